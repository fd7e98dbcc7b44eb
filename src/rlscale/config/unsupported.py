"""Settings that the configuration accepts by name and that this version does not support yet.

Whoever implements a feature deletes its entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.rules import server_groups, warn_ignored
from rlscale.config.rules.model import architecture_field
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_REMOVE = "remove it"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsupportedFeature:
    """A feature that is not implemented, and the keys that need it."""

    name: str  # as in "not supported yet: <name>"
    fix: str = _REMOVE
    keys: tuple[str, ...] = ()  # keys for which only the default is supported
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # supported values of further keys


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportedValues:
    """The supported values of a key, the feature that other values need, and the advice for those."""

    values: tuple[Any, ...]
    feature: str
    fix: str


UNSUPPORTED: tuple[UnsupportedFeature, ...] = ()


WAITING_OPTIONS: Mapping[str, str] = MappingProxyType({})
"""`group=option` -> the feature that it waits for."""


UNSUPPORTED_ARGUMENTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # SGLang also loads the weights of a sync into the draft model.
        "speculative decoding with a draft model": {"sglang.speculative_draft_model_path": None},
        "media encoders on separate servers": {"sglang.encoder_only": False, "sglang.language_only": False},
        "multi-token prediction on a separate pipeline stage": {"megatron.mtp_standalone": False},
        "training in FP8 or FP4": {
            "megatron.fp8": None,
            "megatron.fp8_param": False,
            "megatron.fp4": None,
            "megatron.fp4_param": False,
        },
        "hybrid or hierarchical context parallelism": {
            "megatron.hybrid_context_parallel": False,
            "megatron.hierarchical_context_parallel_sizes": None,
        },
        "CUDA graphs of training steps": {
            "megatron.cuda_graph_impl": "none",
            "megatron.enable_cuda_graph": False,
            "megatron.external_cuda_graph": False,
        },
        "overlap of expert communication and computation": {
            "megatron.delay_wgrad_compute": False,
            "megatron.overlap_moe_expert_parallel_comm": False,
        },
        "recomputation of some micro-batches": {"megatron.num_microbatches_with_partial_activation_checkpoints": None},
        "user buffers of Transformer Engine": {"megatron.tp_comm_overlap": False},
        "a separate gradient pass of the output layer": {"megatron.defer_embedding_wgrad_compute": False},
        "QK clipping": {"megatron.qk_clip": False},
    }
)
"""Feature -> arguments of SGLang and Megatron-core that request it, with the supported value of each."""


def _argument_problems(config: RunConfig) -> list[Problem]:
    """One problem for each argument of a library that requests a feature which is not implemented."""
    given = {f"sglang.{name}": value for name, value in config.sglang.server_args.items()}
    for group in server_groups(config):
        given |= {f"sglang.{name}": value for name, value in group.server_args.items()}
    given |= {f"megatron.{name}": value for name, value in config.megatron.core_args.items()}
    return [
        Problem(path=path, rule=f"be {show(right)} (not supported yet: {name})", value=show(given[path]), fix=_REMOVE)
        for name, arguments in UNSUPPORTED_ARGUMENTS.items()
        for path, right in arguments.items()
        # null is the default of every argument. The warning about an ignored group gives the better reason.
        if given.get(path) not in (None, right) and not warn_ignored(config, [path])
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendGap:
    """A feature that one backend has and the other one does not have yet."""

    path: str  # the key that requests it
    rule: str  # rule for the key's value with the backend that lacks the feature
    is_requested: Callable[[RunConfig], bool]
    fix: str = "choose train=fsdp, or remove it"


# Gaps are rules with a condition, while UNSUPPORTED applies to every run.
MEGATRON_GAPS: tuple[BackendGap, ...] = (
    BackendGap(
        path="optim.name",
        rule="be adam or muon",
        is_requested=lambda config: config.optim.name == OptimizerName.deepspeed_cpu_adam,
        fix="set megatron.optimizer_cpu_offload=true instead, or choose train=fsdp",
    ),
)
"""Features that need `train.backend=fsdp`. Adapters and the true-on-policy mode have their own rules."""


def _gap_problems(config: RunConfig) -> list[Problem]:
    if config.train.backend != TrainBackendName.megatron:
        return []
    condition = " with train.backend=megatron"
    return [
        Problem(
            path=gap.path,
            rule=gap.rule + condition * (gap.path != "train.backend") + " (not supported yet)",
            value=show(attrgetter(gap.path)(config)),
            fix=gap.fix,
        )
        for gap in MEGATRON_GAPS
        if gap.is_requested(config)
    ]


def _family_problems(config: RunConfig) -> list[Problem]:
    """A problem if the model is of a family whose weights Megatron-core does not have yet."""
    family = architecture_field(config.model, "model_type")
    if config.train.backend != TrainBackendName.megatron or family is None or find_family(family).megatron:
        return []
    rule = f"be fsdp with model.model_type={family} (not supported yet: this family with Megatron-core)"
    return [Problem(path="train.backend", rule=rule, value=show(config.train.backend), fix="choose train=fsdp")]


@cache
def supported_values() -> Mapping[str, SupportedValues]:
    """The supported values of each key for which some value is not supported."""
    found: dict[str, SupportedValues] = {}
    for feature in UNSUPPORTED:
        supported = {path: (keys()[path].default,) for path in feature.keys} | dict(feature.values)
        for path, values in supported.items():
            assert path not in found, f"{path} must be listed once, got a second feature: {feature.name}"
            found[path] = SupportedValues(values=values, feature=feature.name, fix=feature.fix)
    return MappingProxyType(found)


def check_supported(config: RunConfig) -> list[Problem]:
    """One problem for each key whose value needs a feature that is not implemented.

    A key without effect in this run is skipped: its warning gives the better reason.
    """
    problems = []
    for path, known in supported_values().items():
        value = attrgetter(path)(config)
        if value in known.values or warn_ignored(config, [path]):
            continue
        listed = ", ".join(show(item) for item in known.values)
        rule = f"be {listed}" if len(known.values) == 1 else f"be one of {listed}"
        rule += f" (not supported yet: {known.feature})"
        problems.append(Problem(path=path, rule=rule, value=show(value), fix=known.fix))
    return problems + _argument_problems(config) + _gap_problems(config) + _family_problems(config)
