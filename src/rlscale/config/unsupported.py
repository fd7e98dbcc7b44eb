"""The one list of what the configuration can name and this version cannot do yet.

Building a part means deleting its lines here.
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
from rlscale.config.notes import ignored
from rlscale.config.resolve.derived import DERIVATIONS
from rlscale.config.resolve.draft import Draft
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_LEAVE_OUT = "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Something that is not built yet, and the keys that wait for it."""

    name: str  # what is missing, as in "not built yet: <name>"
    fix: str = _LEAVE_OUT
    keys: tuple[str, ...] = ()  # of these only the default works
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # of these the ones given work


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The values of a key that work, what the others wait for, and what to write to get one that works."""

    values: tuple[Any, ...]
    waits_for: str
    fix: str


PARTS: tuple[Part, ...] = (
    Part(
        name="user code in the generation loop",
        keys=(
            "rollout.function_path",
            "eval.function_path",
            "sampling.custom_generate_function_path",
            "sampling.custom_rollout_log_function_path",
            "reward.post_process_path",
        ),
    ),
    Part(
        name="over-sampling and filters",
        keys=("sampling.over_sampling_batch_size", "sampling.dynamic_filter_path"),
    ),
    Part(
        name="partial rollouts",
        keys=(
            "sampling.partial_rollout",
            "sampling.mask_offpolicy_in_partial_rollout",
            "sampling.buffer_filter_path",
        ),
    ),
    Part(name="prompts with media or tools", keys=("data.multimodal_keys", "data.tool_key", "eval.tool_key")),
    Part(
        name="that reward",
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
    Part(name="rewards of whole groups and from servers", keys=("reward.group", "reward.url")),
    Part(
        name="rlscale's own router",
        fix="leave it out; router.enabled=true starts sglang-router",
        keys=("router.use_middleware_router", "router.middleware_paths"),
    ),
    Part(
        name="trajectories from a service",
        keys=(
            "buffer.url",
            "buffer.fetch_trajectory_retry_times",
            "buffer.min_batch_collection_ratio",
            "buffer.task_type",
        ),
    ),
    Part(name="requests by proxy or from several nodes", keys=("network.http_proxy", "network.use_distributed_post")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """Something that one backend has and the other one has not yet."""

    path: str  # the key that asks for it
    rule: str  # what it must be instead
    is_asked: Callable[[RunConfig], bool]
    fix: str = "choose train=fsdp, or leave it out"


def _not_null(path: str) -> Lack:
    return Lack(path=path, rule="be null", is_asked=lambda config: attrgetter(path)(config) is not None)


MEGATRON_LACKS: tuple[Lack, ...] = (
    Lack(path="optim.name", rule="be adam", is_asked=lambda config: config.optim.name != OptimizerName.adam),
    _not_null("optim.matrix_lr"),
    _not_null("optim.embedding_lr"),
    _not_null("optim.unembedding_lr"),
    _not_null("train.only_train_params"),
    _not_null("train.freeze_params"),
)
"""What needs `train.backend=fsdp`; adapters and the true-on-policy mode have rules of their own that say so."""


def _lacks(config: RunConfig) -> list[Problem]:
    if config.train.backend != TrainBackendName.megatron:
        return []
    beside = " with train.backend=megatron"
    return [
        Problem(
            path=lack.path,
            rule=lack.rule + beside * (lack.path != "train.backend") + " (not built yet)",
            value=show(attrgetter(lack.path)(config)),
            fix=lack.fix,
        )
        for lack in MEGATRON_LACKS
        if lack.is_asked(config)
    ]


@cache
def unbuilt() -> Mapping[str, Built]:
    """What of each key works, for the keys of which not everything does."""
    found: dict[str, Built] = {}
    for part in PARTS:
        works = {path: (keys()[path].default,) for path in part.keys} | dict(part.values)
        for path, values in works.items():
            assert path not in found, f"{path} must wait for one part, got another: {part.name}"
            found[path] = Built(values=values, waits_for=part.name, fix=part.fix)
    return MappingProxyType(found)


def check_built(config: RunConfig) -> list[Problem]:
    """One problem for each key whose value names a part that is not there yet.

    A key that has no effect in this run anyway is none: it is reported as ignored, for the reason that matters. Nor is
    a value that is derived where none is given, so that a resolved config can be read back.
    """
    wanting = [path for path, built in unbuilt().items() if attrgetter(path)(config) not in built.values]
    derived = _derived(config, wanting) if wanting else {}
    problems = []
    for path in wanting:
        value, built = attrgetter(path)(config), unbuilt()[path]
        if derived.get(path, built) == value or ignored(config, [path]):
            continue
        works = ", ".join(show(item) for item in built.values)
        rule = f"be {works}" if len(built.values) == 1 else f"be one of {works}"
        rule += f" (not built yet: {built.waits_for})"
        problems.append(Problem(path=path, rule=rule, value=show(value), fix=built.fix))
    return problems + _lacks(config)


def _derived(config: RunConfig, paths: Sequence[str]) -> dict[str, Any]:
    """What the keys would be if none of them were given."""
    draft = Draft(config=config.writable_copy())
    for path in paths:
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(draft.config) if group else draft.config, name, keys()[path].default)
    for step in DERIVATIONS:
        step(draft)
    return {each.key: each.value for each in draft.derived}
