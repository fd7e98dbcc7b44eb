"""User functions and classes that a key names by dotted path: imports them and checks that they can be called.

User code runs here for the first time: after all other checks have passed, and before anything starts.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from rlscale.config.groups.algo import LossType, compares_policies
from rlscale.config.groups.base import DOTTED_PATH
from rlscale.config.groups.custom import PARAMETER
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.problems import nearest
from rlscale.config.rules import (
    builtin_rewards,
    frozen_models,
    has_reward_engines,
    only_evaluates,
    uses_engines,
    uses_router,
)
from rlscale.config.run_config import RunConfig
from rlscale.config.slime_modules import KEY, VARIABLE, install_slime_modules
from rlscale.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """A key that names user code, and the arguments of its call."""

    key: str
    arguments: tuple[str, ...]  # by position
    is_called: Callable[[RunConfig], bool]
    by_name: bool = False  # it may take the arguments by name instead
    creates: str = ""  # what a call returns, when a class may be given instead of a function; empty: no class allowed
    methods: tuple[str, ...] = ()  # that a class must have
    optional: tuple[str, ...] = ()  # arguments that a function gets by name if it has such a parameter
    document_arguments: tuple[str, ...] = ()  # by position, of functions in slime's form; empty: rlscale's only


def _uses_megatron(config: RunConfig) -> bool:
    return config.train.backend == TrainBackendName.megatron and not config.debug.rollout_only


JUDGE = "judge"
"""Parameter of a reward that receives the client of `reward.engine`."""

ROUTER = "router"
"""Parameter of a middleware that receives the router."""

LOGITS = "logits"
"""Parameter of `algo.custom_loss_function_path` that receives the logits of the policy."""

HOOKS: Mapping[str, Hook] = MappingProxyType(
    {
        hook.key: hook
        for hook in (
            Hook(
                key="router.middleware_paths",
                arguments=("app",),
                is_called=lambda config: uses_router(config) and config.router.use_middleware_router,
                creates="an ASGI application",
                optional=(ROUTER,),
            ),
            Hook(
                key="data.data_source_path",
                arguments=("config", "tokenizer"),
                is_called=lambda config: not only_evaluates(config),
                creates="a data source",
                document_arguments=("args",),
            ),
            *(
                Hook(
                    key=key,
                    arguments=("sample",),
                    is_called=uses_engines,
                    by_name=True,
                    optional=(JUDGE,),
                    document_arguments=("args", "sample"),
                )
                for key in ("reward.custom_path", "reward.functions")
            ),
            Hook(
                key="sampling.dynamic_filter_path",
                arguments=("group",),
                is_called=uses_engines,
                document_arguments=("args", "samples"),
            ),
            Hook(
                key="sampling.buffer_filter_path",
                arguments=("buffer", "num_groups"),
                is_called=lambda config: config.sampling.partial_rollout,
                document_arguments=("args", "rollout_id", "buffer", "num_samples"),
            ),
            Hook(
                key="sampling.custom_generate_function_path",
                arguments=("trajectory", "session"),
                is_called=uses_engines,
                document_arguments=("args", "sample", "sampling_params"),
            ),
            Hook(key="agent.function_path", arguments=("task", "session"), is_called=uses_engines),
            Hook(
                key="agent.environment_path",
                arguments=(),
                is_called=uses_engines,
                creates="an environment",
                methods=("reset", "step"),
            ),
            Hook(
                key="rollout.function_path",
                arguments=("rollout_id", "context"),
                is_called=uses_engines,
                document_arguments=("args", "rollout_id", "data_source"),
            ),
            Hook(
                key="eval.function_path",
                arguments=("rollout_id", "context"),
                is_called=lambda config: uses_engines(config) and config.eval.interval is not None,
                document_arguments=("args", "rollout_id", "data_source"),
            ),
            Hook(
                key="sampling.sample_filter_path",
                arguments=("groups",),
                is_called=uses_engines,
                document_arguments=("args", "samples"),
            ),
            Hook(
                key="sampling.all_samples_process_path",
                arguments=("groups",),
                is_called=uses_engines,
                document_arguments=("args", "samples", "data_source"),
            ),
            Hook(
                key="train.convert_samples_path",
                arguments=("groups", "batch"),
                is_called=lambda config: compares_policies(config.algo),
                document_arguments=("args", "samples"),
            ),
            Hook(
                key="eval.custom_log_function_path",
                arguments=("rollout_id", "groups", "metrics"),
                is_called=lambda config: config.eval.interval is not None,
                document_arguments=("rollout_id", "args", "data", "extra_metrics"),
            ),
            Hook(
                key="sampling.custom_rollout_log_function_path",
                arguments=("rollout_id", "groups", "metrics"),
                is_called=uses_engines,
                document_arguments=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
            ),
            Hook(
                key="reward.post_process_path",
                arguments=("groups",),
                is_called=lambda config: compares_policies(config.algo),
                document_arguments=("args", "samples"),
            ),
            Hook(
                key="algo.custom_loss_function_path",
                arguments=("logprobs", "tokens"),
                optional=(LOGITS,),
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
"""The arguments of user code by key. The protocols in `rlscale.hook_protocols` define what it returns."""


def check_hooks(config: RunConfig) -> list[Problem]:
    """Problems of all user code that this run calls: it cannot be imported, or not be called with its arguments."""
    problems: list[Problem] = []
    if config.run.slime_modules:
        try:
            install_slime_modules()
        except ConfigError as error:
            return list(error.problems)
    for hook in HOOKS.values():
        if not hook.is_called(config):
            continue
        for key, path in hook_paths(hook, config).items():
            try:
                load_hook(key, path)
            except ConfigError as error:
                problems += error.problems
    return problems or [*_logits_problems(config), *_judge_problems(config)]


def hook_paths(hook: Hook, config: RunConfig) -> dict[str, str]:
    """The dotted paths of a hook by key; a key of several by name, such as `reward.functions`, has a path for each."""
    given: str | Sequence[str] | Mapping[str, str] | None = attrgetter(hook.key)(config)
    if given is None:
        return {}
    if isinstance(given, str):
        return {hook.key: given}
    if not isinstance(given, Mapping):
        return {f"{hook.key}.{index}": path for index, path in enumerate(given)}
    # Names without a module are those of built-ins.
    return {f"{hook.key}.{name}": path for name, path in given.items() if re.match(DOTTED_PATH, path)}


def find_hook(key: str) -> Hook:
    """The hook of a key, or of an entry of a key: `reward.functions.<name>`."""
    return HOOKS.get(key) or HOOKS[key.rpartition(".")[0]]


def _logits_problems(config: RunConfig) -> list[Problem]:
    """A loss that reads logits needs them whole on every rank."""
    path, size = config.algo.custom_loss_function_path, config.megatron.tensor_model_parallel_size
    is_called = HOOKS["algo.custom_loss_function_path"].is_called(config)
    if path is None or not is_called or not _uses_megatron(config) or size == 1 or not reads_logits(path):
        return []
    rule = f"be 1 with a loss that has the parameter {LOGITS}: its ranks divide the vocabulary"
    fix = f"set it to 1, e.g. with pipeline or context parallelism, or remove the parameter from {path}"
    return [Problem(path="megatron.tensor_model_parallel_size", rule=rule, value=str(size), fix=fix)]


def _judge_problems(config: RunConfig) -> list[Problem]:
    """A function that asks the judge needs engines, and engines need a reward that asks them."""
    if not uses_engines(config):
        return []
    hooks = [HOOKS["reward.custom_path"], HOOKS["reward.functions"]]
    paths = {key: path for hook in hooks for key, path in hook_paths(hook, config).items()}
    key = "reward.engine.num_gpus"
    if not has_reward_engines(config):
        if frozen_models(config):
            return []  # it asks those
        fix = f"set {key}, e.g. to 1, or remove the parameter"
        rule = f"have no parameter {JUDGE} without {key}"
        needy = {name: path for name, path in paths.items() if has_judge_parameter(load_hook(name, path))}
        return [Problem(path=name, rule=rule, value=path, fix=fix) for name, path in needy.items()]
    is_used = any(takes_judge(load_hook(name, path)) for name, path in paths.items())
    if not paths or is_used or "judge" in builtin_rewards(config).values():
        return []
    rule, fix = "be 0 without a reward that asks the engines", f"set it to 0, or add a parameter {JUDGE} to your reward"
    return [Problem(path=key, rule=rule, value=str(config.reward.engine.num_gpus), fix=fix)]


def takes_judge(function: Callable[..., Any]) -> bool:
    """Whether a reward gets the client of `reward.engine`, as its parameter `judge` or among `**kwargs`."""
    signature = _signature(function)
    if signature is None:
        return False
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return names_judge(function) or inspect.Parameter.VAR_KEYWORD in kinds


def names_judge(function: Callable[..., Any]) -> bool:
    """Whether a reward has the parameter `judge`."""
    signature = _signature(function)
    return signature is not None and JUDGE in signature.parameters


def has_judge_parameter(function: Callable[..., Any]) -> bool:
    """Whether a reward needs the client: it has a parameter for it without a default."""
    signature = _signature(function)
    parameter = None if signature is None else signature.parameters.get(JUDGE)
    return parameter is not None and parameter.default is parameter.empty


def takes_router(middleware: Callable[..., Any]) -> bool:
    """Whether a middleware has the parameter `router`."""
    signature = _signature(middleware)
    return signature is not None and ROUTER in signature.parameters


def reads_logits(path: str) -> bool:
    """Whether the loss `path` has a parameter `logits`. Raises as `load_hook`."""
    signature = _signature(load_hook("algo.custom_loss_function_path", path))
    return signature is not None and LOGITS in signature.parameters


def load_hook(key: str, path: str) -> Callable[..., Any]:
    """Imports the function or class `path` for the key `key` of `HOOKS`.

    Args:
        path: `package.module:name` or `package.module.name`. Modules in the working directory are found too.

    Raises: ConfigError, naming the key: it cannot be imported, or cannot be called with the arguments of the key.
    """
    found = import_path(path, key=key)
    check_hook(key, found, path=path)
    return found  # type: ignore[no-any-return]


def check_hook(key: str, found: Any, *, path: str) -> None:
    """Checks that an object is a function or class for the key `key` of `HOOKS`; `path` names it in the error.

    Raises: ConfigError, naming the key: it cannot be called with the arguments of the key.
    """
    # A class is accepted only where calling it creates the object that is needed.
    hook = find_hook(key)
    if inspect.isclass(found) and not hook.creates:
        raise _error(key, "be a function or an object", path, "it is a class; create an instance in the module")
    if not callable(found):
        rule = f"be a class or a function that returns {hook.creates}" if hook.creates else "be callable"
        raise _error(key, rule, path, f"it is of type {type(found).__name__}")
    # A class with __getattr__ may find its methods later.
    missing = [each for each in hook.methods if not callable(getattr(found, each, None))]
    if missing and inspect.isclass(found) and not hasattr(found, "__getattr__"):
        raise _error(key, f"have the methods {' and '.join(hook.methods)}", path, f"define {missing[0]}")
    signature = _signature(found)
    if signature is not None and not (
        _accepts_positions(signature, hook) or _accepts_names(signature, hook) or _is_document_form(signature, hook)
    ):
        forms = [f"({', '.join(names)})" for names in (hook.arguments, hook.document_arguments) if names]
        rule = f"be callable with {' or '.join(forms)}"
        raise _error(key, rule, path, f"its parameters are {signature}")


def is_document_form(key: str, function: Callable[..., Any]) -> bool:
    """Whether the function takes slime's arguments, e.g. `(args, sample)`, instead of those of rlscale.

    A function that accepts both takes slime's if its first parameter has the name of slime's.
    """
    signature = _signature(function)
    return signature is not None and _is_document_form(signature, find_hook(key))


def accepts_positions(key: str, function: Callable[..., Any]) -> bool:
    """Whether the function takes the arguments of rlscale by position; else it takes them by name."""
    signature = _signature(function)
    hook = find_hook(key)
    return signature is None or accepts(_without_optional(signature, hook), *hook.arguments)


def accepts(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Whether a function with this signature accepts the arguments; rlscale itself passes the parameter `custom`."""
    named = [parameter for name, parameter in signature.parameters.items() if name != PARAMETER]
    try:
        # bind() checks the arguments without calling the function.
        signature.replace(parameters=named).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _accepts_positions(signature: inspect.Signature, hook: Hook) -> bool:
    return accepts(_without_optional(signature, hook), *hook.arguments)


def _is_document_form(signature: inspect.Signature, hook: Hook) -> bool:
    signature = _without_optional(signature, hook)
    if not hook.document_arguments or not accepts(signature, *hook.document_arguments):
        return False
    first = next(iter(signature.parameters.values()))
    if hook.arguments[0] != hook.document_arguments[0] and first.kind != first.VAR_POSITIONAL:  # no `*args`
        if first.name == hook.document_arguments[0]:
            return True
        if first.name == hook.arguments[0]:
            return False
    return not (accepts(signature, *hook.arguments) or _accepts_names(signature, hook))


def _accepts_names(signature: inspect.Signature, hook: Hook) -> bool:
    return hook.by_name and accepts(_without_optional(signature, hook), **dict.fromkeys(hook.arguments))


def _without_optional(signature: inspect.Signature, hook: Hook) -> inspect.Signature:
    """The signature without the parameters that get an argument by name."""
    kept = [parameter for name, parameter in signature.parameters.items() if name not in hook.optional]
    return signature.replace(parameters=kept)


def _signature(found: Callable[..., Any]) -> inspect.Signature | None:
    """The signature; None for callables without one, such as some C functions, which fail only when called."""
    try:
        return inspect.signature(found)
    except (TypeError, ValueError):
        return None


def as_dotted(path: str) -> str:
    """`folder.file:name` for `folder/file.py:name`, a file below the working folder; any other path unchanged."""
    file, colon, name = path.partition(":")
    is_file = colon and file.endswith(".py")
    return f"{file.removesuffix('.py').removeprefix('./').replace('/', '.')}:{name}" if is_file else path


def import_path(path: str, *, key: str) -> Any:
    """Imports the object `path` for a key. Raises ConfigError, naming the key, if that fails."""
    if os.environ.get(VARIABLE):
        install_slime_modules()  # in a child process of one that did
    module_name, _, name = as_dotted(path).replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        # At the end, so that it hides no installed module.
        sys.path.append(os.getcwd())
    rule = "be importable"
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may raise anything; reported as ConfigError
        fix = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing.partition(".")[0] == "slime" and not os.environ.get(VARIABLE):
            fix += f"; set {KEY}=true: rlscale then provides slime's modules to user functions"
        elif missing == module_name:
            fix += f"; check its name, and that it is installed or in {os.getcwd()}"
        raise _error(key, rule, path, fix) from error
    if not hasattr(module, name):
        if name == "py":
            raise _error(key, rule, path, f"write the name of the function, too: {path}:<name>")
        # Private names are not suggested.
        near = nearest(name, [other for other in vars(module) if not other.startswith("_")])
        fix = f"{module.__file__ or module_name} has no {name!r}"
        raise _error(key, rule, path, f"{fix}; did you mean {near}?" if near else fix)
    return getattr(module, name)


def _error(key: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=key, rule=rule, value=value, fix=fix)])
