"""The one list of what the configuration can name and this version cannot do yet.

Building a part means deleting its lines here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from rlscale.config.derive import DERIVATIONS
from rlscale.config.notes import ignored
from rlscale.config.problems import show
from rlscale.config.resolve import Draft
from rlscale.config.reward import RewardType
from rlscale.config.run import RunConfig
from rlscale.config.schema import keys
from rlscale.config.train import TrainBackendName
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
        name="the Megatron-core backend",
        fix="choose train=fsdp",
        values={"train.backend": (TrainBackendName.fsdp,)},
        keys=(
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.context_parallel_size",
            "megatron.expert_model_parallel_size",
            "megatron.recompute_granularity",
            "megatron.use_distributed_optimizer",
            "megatron.bf16",
            "megatron.seq_length",
            "megatron.max_position_embeddings",
            "megatron.rope_type",
            "megatron.variable_seq_lengths",
            "megatron.init_hook_path",
            "megatron.before_log_prob_hook_path",
            "megatron.before_train_step_hook_path",
            "model.name",
            "model.megatron_to_hf_mode",
            "model.custom_model_provider_path",
            "model.use_hf_config_for_megatron",
            "model.padded_vocab_size",
        ),
    ),
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
    Part(name="SFT of whole conversations", keys=("data.loss_mask_type", "eval.num_batches")),
    Part(
        name="that reward",
        fix="choose reward=exact_match or reward=math, or set reward.custom_path",
        values={"reward.type": (None, RewardType.exact_match, RewardType.math, RewardType.random)},
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
    Part(name="replay of expert routing", values={"algo.use_routing_replay": (False,)}),
)


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
    return problems


def _derived(config: RunConfig, paths: Sequence[str]) -> dict[str, Any]:
    """What the keys would be if none of them were given."""
    draft = Draft(config=config.writable_copy())
    for path in paths:
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(draft.config) if group else draft.config, name, keys()[path].default)
    for step in DERIVATIONS:
        step(draft)
    return {each.key: each.value for each in draft.derived}
