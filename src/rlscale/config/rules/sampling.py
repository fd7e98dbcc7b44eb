"""Rules about the sampling of responses and the selection of groups."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

from rlscale.config.groups.rollout import EngineKind, UpdateMode
from rlscale.config.groups.sampling import GenerateIsolation
from rlscale.config.groups.train import LoraSync
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.rules.batch import MAX_TRAJECTORIES
from rlscale.config.rules.conditions import is_sft, overlaps, resyncs_engines, uses_engines
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

MAX_STOP_STRINGS = 32  # SGLang's limit
ACCURACY_BAND = "rlscale.rollout.group_filters:accuracy_band"


@rule
def stop_strings_are_valid(config: RunConfig) -> list[Problem]:
    strings = config.rollout.stop
    if strings is None:
        return []
    if "" in strings:
        fix = "remove the empty string; every text contains it"
        return [Problem(path="rollout.stop", rule="contain no empty string", value=show(strings), fix=fix)]
    if len(strings) > MAX_STOP_STRINGS:
        rule = f"have at most {MAX_STOP_STRINGS} entries"
        return [Problem(path="rollout.stop", rule=rule, value=str(len(strings)), fix="keep the most likely ones")]
    return []


@rule
def stop_token_ids_are_tokens(config: RunConfig) -> list[Problem]:
    """No model samples another id, and the embedded engine would count a negative one from the end."""
    path, size = "rollout.stop_token_ids", architecture_field(config.model, "vocab_size")
    wrong = [each for each in config.rollout.stop_token_ids or () if each < 0 or (size is not None and each >= size)]
    if not wrong:
        return []
    rule = "contain ids from 0" if size is None else f"contain ids from 0 to {size - 1}, below model.vocab_size={size}"
    return [Problem(path=path, rule=rule, value=show(wrong[0]), fix="write ids of the tokenizer, or remove it")]


@rule
def deterministic_sglang_excludes_min_p(config: RunConfig) -> list[Problem]:
    deterministic = config.sglang.server_args.get("enable_deterministic_inference", False)
    if config.rollout.engine != EngineKind.sglang or not deterministic or config.rollout.min_p == 0:
        return []
    rule, fix = "be 0 with sglang.enable_deterministic_inference", "SGLang does not support both; remove one of them"
    return [Problem(path="rollout.min_p", rule=rule, value=show(config.rollout.min_p), fix=fix)]


@rule
def eval_min_new_tokens_fits(config: RunConfig) -> list[Problem]:
    least, own = config.eval.min_new_tokens, config.eval.max_response_len
    # The resolve step copies the length of the rollout into an unset eval key.
    longest = config.rollout.max_response_len if own is None else own
    if least is None or least <= longest:
        return []
    rule = f"be at most the maximum response length of {longest} tokens"
    return [Problem(path="eval.min_new_tokens", rule=rule, value=show(least), fix=f"set it to {longest} or less")]


@rule
def some_difficulty_is_drawn(config: RunConfig) -> list[Problem]:
    weights = config.sampling.difficulty_weights
    if weights is None or (all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)):
        return []
    fix = "change the weights, or remove them to draw all prompts equally often"
    rule = "be numbers from 0, at least one above 0"
    return [Problem(path="sampling.difficulty_weights", rule=rule, value=show(weights), fix=fix)]


@rule
def accuracy_band_has_limits(config: RunConfig) -> list[Problem]:
    """The filter reads them when the first group is finished."""
    band: Any = config.custom.get("accuracy_band")
    is_pair = isinstance(band, list | tuple) and len(band) == 2
    is_band = is_pair and all(type(each) in (int, float) for each in band) and band[0] <= band[1]
    if config.sampling.dynamic_filter_path != ACCURACY_BAND or is_band:
        return []
    rule, fix = "be two numbers, the lower one first", "set ++custom.accuracy_band=[0.1,0.9]"
    return [Problem(path="custom.accuracy_band", rule=rule, value=show(band), fix=fix)]


@rule
def min_group_size_fits_a_group(config: RunConfig) -> list[Problem]:
    least, size = config.sampling.min_group_size, config.batch.n_samples_per_prompt
    # The default, 2, may be above a group of one.
    if least <= max(size, 2):
        return []
    rule, fix = f"be at most batch.n_samples_per_prompt={size}", f"set it to {size} to train whole groups only"
    return [Problem(path="sampling.min_group_size", rule=rule, value=show(least), fix=fix)]


@rule
def over_sampling_covers_a_rollout(config: RunConfig) -> list[Problem]:
    number, least = config.sampling.over_sampling_batch_size, config.batch.rollout_batch_size
    if number is None or number >= least:
        return []
    rule, fix = f"be at least batch.rollout_batch_size={least}", f"set it to {least} or more, or remove it"
    return [Problem(path="sampling.over_sampling_batch_size", rule=rule, value=show(number), fix=fix)]


@rule
def over_sampling_is_within_the_measured_size(config: RunConfig) -> list[Problem]:
    """The loop keeps every trajectory in flight in memory, which a mistyped number would fill."""
    number, size = config.sampling.over_sampling_batch_size, config.batch.n_samples_per_prompt
    most = max(config.batch.rollout_batch_size, MAX_TRAJECTORIES // size)
    if number is None or number <= most:
        return []
    rule = f"be at most {most} with batch.n_samples_per_prompt={size}, for {MAX_TRAJECTORIES:,} trajectories in flight"
    fix = f"set it to a few times batch.rollout_batch_size={config.batch.rollout_batch_size}, or remove it"
    return [Problem(path="sampling.over_sampling_batch_size", rule=rule, value=show(number), fix=fix)]


@rule
def off_policy_mask_needs_partial_rollout(config: RunConfig) -> list[Problem]:
    if not config.sampling.mask_offpolicy_in_partial_rollout or config.sampling.partial_rollout:
        return []
    rule, fix = "be false without sampling.partial_rollout", "set sampling.partial_rollout=true, or remove it"
    return [Problem(path="sampling.mask_offpolicy_in_partial_rollout", rule=rule, value="true", fix=fix)]


@rule
def buffer_filter_needs_partial_rollout(config: RunConfig) -> list[Problem]:
    path = config.sampling.buffer_filter_path
    if path is None or config.sampling.partial_rollout:
        return []
    rule = "be null without sampling.partial_rollout"
    fix = "set sampling.partial_rollout=true, or remove it; no groups are buffered without it"
    return [Problem(path="sampling.buffer_filter_path", rule=rule, value=path, fix=fix)]


_HOOKS = (
    "data.data_source_path",
    "eval.custom_log_function_path",
    "reward.post_process_path",
    "sampling.all_samples_process_path",
    "sampling.buffer_filter_path",
    "sampling.custom_rollout_log_function_path",
    "sampling.sample_filter_path",
    "train.convert_samples_path",
)
"""User functions that `sampling.hook_timeout_s` limits, in addition to filters of groups."""


def _has_hooks(config: RunConfig) -> bool:
    dynamic = config.sampling.dynamic_filter_path
    # The built-in filters have no deadline.
    is_own_filter = dynamic is not None and not dynamic.startswith("rlscale.")
    return is_own_filter or any(attrgetter(key)(config) is not None for key in _HOOKS)


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("sampling.hook_timeout_s",),
        when=lambda config: not _has_hooks(config),
        why="no filter, hook or data source of yours is set",
    ),
    IgnoredKey(
        names=("rollout.function_timeout_s",),
        when=lambda config: config.rollout.function_path is None and config.eval.function_path is None,
        why="neither rollout.function_path nor eval.function_path is set",
    ),
    IgnoredKey(
        names=(
            "algo.dynamic_sampling",
            "sampling.dynamic_filter_path",
            "sampling.over_sampling_batch_size",
            "sampling.round_tokens",
        ),
        when=lambda config: config.rollout.function_path is not None,
        why="rollout.function_path replaces the loop that collects a rollout",
    ),
    IgnoredKey(
        names=("rollout.num_slots", "rollout.deterministic"),
        when=lambda config: config.rollout.engine != EngineKind.embedded,
        why="only the embedded engine supports it",
    ),
    IgnoredKey(
        names=("rollout.max_staleness",),
        when=is_sft,
        why="supervised training does not generate ahead",
    ),
    IgnoredKey(
        names=("rollout.update_mode",),
        when=lambda config: config.rollout.max_staleness == 0 or is_sft(config),
        why="no request is running during a weight update",
    ),
    IgnoredKey(
        names=("rollout.pause_mode",),
        when=lambda config: (config.rollout.max_staleness == 0 and not resyncs_engines(config)) or is_sft(config),
        why="no request is running during a weight update",
    ),
    IgnoredKey(
        names=("rollout.pause_mode",),
        when=lambda config: config.train.lora.rank > 0 and config.train.lora.sync == LoraSync.adapter,
        why="train.lora.sync=adapter lets running requests keep their version",
    ),
    IgnoredKey(
        names=("rollout.pause_mode",),
        when=lambda config: config.rollout.update_mode == UpdateMode.boundary and not resyncs_engines(config),
        why="with rollout.update_mode=boundary no request is running during a weight update",
    ),
    IgnoredKey(
        names=("sampling.max_weight_versions", "sampling.round_tokens"),
        when=lambda config: not config.sampling.partial_rollout,
        why="no trajectory is continued without sampling.partial_rollout",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("sampling.generate_")),
        when=lambda config: config.sampling.custom_generate_function_path is None,
        why="sampling.custom_generate_function_path is not set",
    ),
    IgnoredKey(
        names=("sampling.generate_processes",),
        when=lambda config: config.sampling.generate_isolation == GenerateIsolation.thread,
        why="sampling.generate_isolation is not process",
    ),
    IgnoredKey(
        names=("eval.keep_last",),
        when=lambda config: (config.eval.function_path or config.rollout.function_path) is not None,
        why="an eval function returns rewards, not samples",
    ),
    IgnoredKey(
        names=("eval.max_weight_versions", "eval.max_concurrency"),
        when=lambda config: not overlaps(config),
        why="no evaluation runs while the trainer works",
    ),
    IgnoredKey(
        names=("eval.max_concurrency",),
        when=lambda config: (config.eval.function_path or config.rollout.function_path) is not None,
        why="an eval function makes its requests itself",
    ),
    IgnoredKey(
        names=("eval.custom_log_function_path",),
        when=lambda config: config.eval.function_path is not None,
        why="eval.function_path returns rewards and metrics, not samples",
    ),
    IgnoredKey(
        names=(
            *(path for path in keys() if path.startswith("sampling.") and path != "sampling.hook_timeout_s"),
            "algo.dynamic_sampling",
        ),
        when=lambda config: not uses_engines(config) or is_sft(config),
        why="the run does not generate",
    ),
    IgnoredKey(
        names=(
            "rollout.deterministic",
            "rollout.external",
            "rollout.external_engine_addrs",
            "rollout.min_p",
            "rollout.num_slots",
            "rollout.skip_special_tokens",
            "rollout.stop",
            "rollout.stop_token_ids",
            "rollout.timeout_s",
            "rollout.top_k",
            "rollout.top_p",
        ),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so there are no engines",
    ),
)
