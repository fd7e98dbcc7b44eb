"""User functions and classes that a key names by dotted path: imports them and checks that they can be called.

User code runs here for the first time: after all other checks have passed, and before anything starts.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from rlscale.config.errors import nearest
from rlscale.config.groups.algo import LossType, compares_policies
from rlscale.config.groups.custom import PARAMETER
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.rules import uses_engines
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """A key that names user code, and the arguments of its call."""

    key: str
    arguments: tuple[str, ...]  # by position
    is_called: Callable[[RunConfig], bool]
    by_name: bool = False  # it may take the arguments by name instead
    creates: str = ""  # what a call returns, when a class may be given instead of a function; empty: no class allowed


def _uses_megatron(config: RunConfig) -> bool:
    return config.train.backend == TrainBackendName.megatron and not config.debug.rollout_only


HOOKS: Mapping[str, Hook] = MappingProxyType(
    {
        hook.key: hook
        for hook in (
            Hook(
                key="data.data_source_path",
                arguments=("config", "tokenizer"),
                is_called=lambda config: True,
                creates="a data source",
            ),
            Hook(key="reward.custom_path", arguments=("sample",), is_called=uses_engines, by_name=True),
            Hook(
                key="algo.custom_loss_function_path",
                arguments=("logprobs", "tokens"),
                is_called=lambda config: config.algo.loss_type == LossType.custom_loss,
            ),
            Hook(
                key="algo.custom_advantage_function_path",
                arguments=("rollout",),
                is_called=lambda config: compares_policies(config.algo),
            ),
            Hook(
                key="algo.custom_tis_function_path",
                arguments=("tokens",),
                is_called=lambda config: config.algo.use_tis and config.algo.loss_type == LossType.policy_loss,
            ),
            Hook(key="algo.custom_reducer_function_path", arguments=("step",), is_called=lambda config: True),
            Hook(
                key="train.rollout_data_postprocess_path",
                arguments=("rollout",),
                is_called=lambda config: compares_policies(config.algo),
            ),
            Hook(key="megatron.init_hook_path", arguments=("megatron",), is_called=_uses_megatron),
            Hook(key="megatron.before_log_prob_hook_path", arguments=("model", "role"), is_called=_uses_megatron),
            Hook(
                key="megatron.before_train_step_hook_path",
                arguments=("rollout_id", "step_id", "model", "optimizer"),
                is_called=_uses_megatron,
            ),
            Hook(
                key="model.custom_model_provider_path",
                arguments=("build", "pre_process", "post_process", "vp_stage"),
                is_called=_uses_megatron,
            ),
        )
    }
)
"""The arguments of user code by key. The protocols in `rlscale.protocols` define what it returns."""


def check_hooks(config: RunConfig) -> list[Problem]:
    """Problems of all user code that this run calls: it cannot be imported, or not be called with its arguments."""
    problems: list[Problem] = []
    for hook in HOOKS.values():
        path: str | None = attrgetter(hook.key)(config)
        if path is None or not hook.is_called(config):
            continue
        try:
            load_hook(hook.key, path)
        except ConfigError as error:
            problems += error.problems
    return problems


def load_hook(key: str, path: str) -> Callable[..., Any]:
    """Imports the function or class `path` for the key `key` of `HOOKS`.

    Args:
        path: `package.module:name` or `package.module.name`. Modules in the working directory are found too.

    Raises: ConfigError, naming the key: it cannot be imported, or cannot be called with the arguments of the key.
    """
    # A class is accepted only where calling it creates the object that is needed.
    hook, found = HOOKS[key], _import_path(path, key=key)
    if inspect.isclass(found) and not hook.creates:
        raise _error(key, "be a function or an object", path, "it is a class; create an instance in the module")
    if not callable(found):
        rule = f"be a class or a function that returns {hook.creates}" if hook.creates else "be callable"
        raise _error(key, rule, path, f"it is of type {type(found).__name__}")
    signature = _signature(found)
    if signature is not None and not (accepts(signature, *hook.arguments) or _accepts_names(signature, hook)):
        rule = f"be callable with ({', '.join(hook.arguments)})"
        raise _error(key, rule, path, f"its parameters are {signature}")
    return found  # type: ignore[no-any-return]


def accepts(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Whether a function with this signature accepts the arguments; rlscale itself passes the parameter `custom`."""
    named = [parameter for name, parameter in signature.parameters.items() if name != PARAMETER]
    try:
        # bind() checks the arguments without calling the function.
        signature.replace(parameters=named).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _accepts_names(signature: inspect.Signature, hook: Hook) -> bool:
    return hook.by_name and accepts(signature, **dict.fromkeys(hook.arguments))


def _signature(found: Callable[..., Any]) -> inspect.Signature | None:
    """The signature; None for callables without one, such as some C functions, which fail only when called."""
    try:
        return inspect.signature(found)
    except (TypeError, ValueError):
        return None


def _import_path(path: str, *, key: str) -> Any:
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        # At the end, so that it hides no installed module.
        sys.path.append(os.getcwd())
    rule = "be importable"
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may raise anything; reported as ConfigError
        fix = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise _error(key, rule, path, fix) from error
    if not hasattr(module, name):
        # Private names are not suggested.
        near = nearest(name, [other for other in vars(module) if not other.startswith("_")])
        fix = f"{module.__file__ or module_name} has no {name!r}"
        raise _error(key, rule, path, f"{fix}; did you mean {near}?" if near else fix)
    return getattr(module, name)


def _error(key: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=key, rule=rule, value=value, fix=fix)])
