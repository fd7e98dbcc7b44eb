"""Loads a user function for a key and adapts it to the protocol of rlscale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from rlscale.config.groups.custom import with_custom
from rlscale.config.user_functions import (
    JUDGE,
    accepts_positions,
    check_hook,
    find_hook,
    has_judge_parameter,
    is_document_form,
    load_hook,
    takes_judge,
)
from rlscale.errors import ConfigError, Problem
from rlscale.hook_protocols import Judge
from rlscale.plugins.args_view import Args
from rlscale.plugins.batch_conversion import DocumentBatchConversion
from rlscale.plugins.data_source_adapter import DocumentDataSourceClass
from rlscale.plugins.generate_adapter import DocumentGenerate
from rlscale.plugins.group_adapters import (
    DocumentAllSamplesHook,
    DocumentBufferFilter,
    DocumentDynamicFilter,
    DocumentEvalLog,
    DocumentRewardPostProcess,
    DocumentRolloutLog,
    DocumentSampleFilter,
)
from rlscale.plugins.reward_adapter import DocumentReward
from rlscale.plugins.rollout_adapter import DocumentEvaluation, DocumentRollout

ADAPTERS: Mapping[str, Callable[[Callable[..., Any], Args], Callable[..., Any]]] = MappingProxyType(
    {
        "data.data_source_path": DocumentDataSourceClass,
        "reward.custom_path": DocumentReward,
        "reward.functions": DocumentReward,
        "reward.post_process_path": DocumentRewardPostProcess,
        "eval.custom_log_function_path": DocumentEvalLog,
        "eval.function_path": DocumentEvaluation,
        "rollout.function_path": DocumentRollout,
        "sampling.all_samples_process_path": DocumentAllSamplesHook,
        "sampling.buffer_filter_path": DocumentBufferFilter,
        "sampling.custom_generate_function_path": DocumentGenerate,
        "sampling.dynamic_filter_path": DocumentDynamicFilter,
        "sampling.custom_rollout_log_function_path": DocumentRolloutLog,
        "sampling.sample_filter_path": DocumentSampleFilter,
        "train.convert_samples_path": DocumentBatchConversion,
    }
)
"""Adapters of functions in slime's form by key. Each is picklable if the function is."""


def load_plugin(
    key: str, path: str, *, args: Args | None, custom: Mapping[str, Any], judge: Judge | None = None
) -> Callable[..., Any]:
    """Loads the function `path` of a key as one with the arguments of rlscale, by position.

    Args:
        args: passed to a function in slime's form. None: such a function is refused.
        custom: passed to a function with a parameter of that name.
        judge: the same, for a reward. None: no sample is scored, or the run has no judge.

    Raises:
        ConfigError, naming the key: it cannot be imported, or not be called with the arguments of the key.

    Example:
        keep = load_plugin("sampling.dynamic_filter_path", "my_filters:spread", args=Args(config), custom=config.custom)
        keep(group)
    """
    return adapt_function(key, load_hook(key, path), args=args, custom=custom, path=path, judge=judge)


def adapt_function(
    key: str,
    function: Callable[..., Any],
    *,
    args: Args | None,
    custom: Mapping[str, Any],
    path: str = "",
    judge: Judge | None = None,
) -> Callable[..., Any]:
    """A function of the user as one with the arguments of rlscale, by position. See `load_plugin`.

    Args:
        path: of the function, for messages.
    """
    check_hook(key, function, path=path or getattr(function, "__name__", "a function"))
    filled = with_custom(function, custom)
    hook = find_hook(key)
    if JUDGE in hook.optional and takes_judge(function) and (judge is not None or has_judge_parameter(function)):
        filled = partial(filled, judge=judge)
    if hook.key in ADAPTERS and is_document_form(key, function):
        if args is None:
            rule, fix = f"be callable with ({', '.join(hook.arguments)})", "no run gives it `args` here"
            raise ConfigError([Problem(path=key, rule=rule, value=path, fix=fix)])
        return ADAPTERS[hook.key](filled, args)
    return filled if accepts_positions(key, function) else partial(_call_by_name, filled, hook.arguments)


def _call_by_name(function: Callable[..., Any], names: Sequence[str], *arguments: Any) -> Any:
    return function(**dict(zip(names, arguments, strict=True)))
