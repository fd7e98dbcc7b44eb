"""The list of settings that the configuration accepts by name and that this version does not support yet.

Whoever implements a feature deletes its entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from rlscale.config.errors import show
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.groups.reward import RewardType
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.keys import keys
from rlscale.config.resolve.derived import DERIVATIONS
from rlscale.config.resolve.draft import Draft
from rlscale.config.rules import warn_ignored
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


UNSUPPORTED: tuple[UnsupportedFeature, ...] = (
    UnsupportedFeature(
        name="user code in the generation loop",
        keys=(
            "rollout.function_path",
            "eval.function_path",
            "sampling.custom_generate_function_path",
            "sampling.custom_rollout_log_function_path",
            "reward.post_process_path",
        ),
    ),
    UnsupportedFeature(
        name="over-sampling and filters",
        keys=("sampling.over_sampling_batch_size", "sampling.dynamic_filter_path"),
    ),
    UnsupportedFeature(
        name="partial rollouts",
        keys=(
            "sampling.partial_rollout",
            "sampling.mask_offpolicy_in_partial_rollout",
            "sampling.buffer_filter_path",
        ),
    ),
    UnsupportedFeature(
        name="prompts with media or tools", keys=("data.multimodal_keys", "data.tool_key", "eval.tool_key")
    ),
    UnsupportedFeature(
        name="this reward",
        fix="choose reward=exact_match or reward=math, or set reward.custom_path",
        values={
            "reward.type": (
                None,
                RewardType.exact_match,
                RewardType.math,
                RewardType.random,
                RewardType.boxed_exact_match,
                RewardType.boxed_math,
            )
        },
    ),
    UnsupportedFeature(name="rewards of whole groups and from servers", keys=("reward.group", "reward.url")),
    UnsupportedFeature(
        name="rlscale's own router",
        fix="remove it; router.enabled=true starts sglang-router",
        keys=("router.use_middleware_router", "router.middleware_paths"),
    ),
    UnsupportedFeature(
        name="trajectories from a service",
        keys=(
            "buffer.url",
            "buffer.fetch_trajectory_retry_times",
            "buffer.min_batch_collection_ratio",
            "buffer.task_type",
        ),
    ),
    UnsupportedFeature(
        name="requests through a proxy or from several nodes",
        keys=("network.http_proxy", "network.use_distributed_post"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendGap:
    """A feature that one backend has and the other one does not have yet."""

    path: str  # the key that requests it
    rule: str  # rule for the key's value with the backend that lacks the feature
    is_requested: Callable[[RunConfig], bool]
    fix: str = "choose train=fsdp, or remove it"


def _not_null(path: str) -> BackendGap:
    return BackendGap(path=path, rule="be null", is_requested=lambda config: attrgetter(path)(config) is not None)


# Gaps are rules with a condition, while UNSUPPORTED applies to every run.
MEGATRON_GAPS: tuple[BackendGap, ...] = (
    BackendGap(path="optim.name", rule="be adam", is_requested=lambda config: config.optim.name != OptimizerName.adam),
    _not_null("optim.matrix_lr"),
    _not_null("optim.embedding_lr"),
    _not_null("optim.unembedding_lr"),
    _not_null("train.only_train_params"),
    _not_null("train.freeze_params"),
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

    A key without effect in this run is skipped: its warning gives the better reason. So is a value that would be
    derived anyway, so that a resolved config can be loaded again.
    """
    found = [path for path, known in supported_values().items() if attrgetter(path)(config) not in known.values]
    derived = _derived_values(config, found) if found else {}
    problems = []
    for path in found:
        value, known = attrgetter(path)(config), supported_values()[path]
        # `known` stands for "not derived": it equals no value.
        if derived.get(path, known) == value or warn_ignored(config, [path]):
            continue
        listed = ", ".join(show(item) for item in known.values)
        rule = f"be {listed}" if len(known.values) == 1 else f"be one of {listed}"
        rule += f" (not supported yet: {known.feature})"
        problems.append(Problem(path=path, rule=rule, value=show(value), fix=known.fix))
    return problems + _gap_problems(config)


def _derived_values(config: RunConfig, paths: Sequence[str]) -> dict[str, Any]:
    """The values that would be derived if none of the keys were set."""
    # Reset the keys to their defaults, then derive: the result is what a user gets without setting them.
    draft = Draft(config=config.writable_copy())
    for path in paths:
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(draft.config) if group else draft.config, name, keys()[path].default)
    for step in DERIVATIONS:
        step(draft)
    return {each.key: each.value for each in draft.derived}
