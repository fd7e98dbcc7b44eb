"""The argument `args` of functions in slime's form: a read-only, flat view of the config."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from operator import attrgetter
from typing import Any, NoReturn

from rlscale.config import RunConfig, TrainBackendName
from rlscale.config.problems import nearest
from rlscale.config.rules import num_engines
from rlscale.plugins.argument_keys import ARGUMENT_KEYS


class Args:
    """Values of a config by slime's names, e.g. `args.rollout_batch_size`. Picklable.

    It also has the entries of the node `custom`, which hide arguments of the same name; arguments of SGLang as
    `sglang_<name>`, those of Megatron-core by their names; and what only a run knows, e.g. `sglang_router_port`.
    Values are copies: changing a list in place does not change the config.

    Raises:
        AttributeError: for an unknown name, with the nearest one, so that `getattr(args, name, default)` works; for
            every assignment.

    Example:
        args = Args(config, runtime={"sglang_router_ip": "127.0.0.1", "sglang_router_port": 30000})
        args.n_samples_per_prompt, args.sglang_router_port
    """

    def __init__(self, config: RunConfig, *, runtime: Mapping[str, Any] | None = None) -> None:
        # Not setattr, which raises. Values in `__dict__` make `vars(args)`, copy and pickle work as for a Namespace.
        self.__dict__.update(deepcopy(argument_values(config) | dict(runtime or {}) | config.custom))

    def __getattr__(self, name: str) -> NoReturn:
        # Python calls this only for a name that is not in `__dict__`.
        near = None if name.startswith("__") else nearest(name, self.__dict__)
        advice = f"did you mean {near}?" if near else f"set it with custom.{name}=<value>"
        raise AttributeError(
            f"args.{name} must be an argument of slime or an entry of custom; {advice}", name=name, obj=self
        )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"args.{name} must not be written, got {value!r}; keep values in your module, or in sample.metadata"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args.{name} must not be deleted; args is read-only")

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # as argparse.Namespace

    def __repr__(self) -> str:
        return f"Args({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def with_runtime(self, values: Mapping[str, Any]) -> Args:
        """A copy with further values; entries of `custom` of the same names stay hidden by them."""
        copy = deepcopy(self)
        copy.__dict__.update(values)
        return copy


class WritableArgs(Args):
    """A copy of `args` that belongs to one call, which may write to it. For functions of `slime_modules` only."""

    def __init__(self, args: Args) -> None:
        self.__dict__.update(vars(args))  # shallow: made for every call

    def __setattr__(self, name: str, value: Any) -> None:  # type: ignore[override]
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:  # type: ignore[override]
        del self.__dict__[name]


def argument_values(config: RunConfig) -> dict[str, Any]:
    """The values of a config by slime's names, without `custom`."""
    values = {name: attrgetter(key)(config) for name, key in ARGUMENT_KEYS.items()}
    if config.train.backend == TrainBackendName.fsdp:
        values["context_parallel_size"] = config.fsdp.context_parallel_size
    values["rollout_num_engines"] = None if config.cluster.rollout_num_gpus is None else num_engines(config)
    # Arguments that functions in slime's form read and that have no key.
    values["eval_max_context_len"] = config.rollout.max_context_len
    values["sglang_dp_size"] = 1
    values["sglang_config"] = config.sglang.config
    values["sglang_reward_model"] = config.reward.engine.name
    values["sglang_frozen_models"] = list(config.sglang.frozen_models)
    passed = {f"sglang_{name}": value for name, value in config.sglang.server_args.items()}
    return config.megatron.core_args | values | passed
