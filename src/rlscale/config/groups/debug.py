"""Group `debug`: alarms, dumps, and runs of a part of the loop."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class DebugConfig(ConfigGroup):
    """Alarms, dumps, and runs of a part of the loop."""

    logprob_diff_warn: Annotated[
        float | None,
        Field(
            gt=0,
            description="Warn when the mean absolute difference of trainer and engine logprobs is above this. None: "
            "1e-4 with `train.dtype=float32`, 0.05 with `bfloat16`, and no warning where `rollout.pause_mode=in_place` "
            "mixes the caches of several weights.",
        ),
    ] = None
    save_rollout_data: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Write every sample of each rollout to this JSONL file, with `{rollout_id}` in its name. None: "
            "no such files.",
        ),
    ] = None
    load_rollout_data: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Train on the samples of this JSONL file, with `{rollout_id}` in its name, as "
            "`debug.save_rollout_data` writes it, instead of generating. Implies `debug.train_only`. None: generate.",
        ),
    ] = None
    rollout_only: Annotated[
        bool, Field(description="Only generate and score: no trainer. Excludes `debug.train_only`.")
    ] = False
    train_only: Annotated[
        bool, Field(description="Only train: no engines, no evaluation. Needs `debug.load_rollout_data` or SFT.")
    ] = False
    save_train_data: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Write the whole batch that each rollout was trained on to this file, with `{rollout_id}` in "
            "its name: safetensors, with the logprobs of trainer and engine. None: no such files.",
        ),
    ] = None
    dump_details: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder for `debug.save_rollout_data`, `debug.save_train_data` and the tokenizer together. "
            "None: none.",
        ),
    ] = None
    memory_snapshot_dir: Annotated[
        str,
        Field(
            min_length=1,
            description="Folder for what a trainer rank leaves when it runs out of memory: `memory_rank_<rank>.json` "
            "lists its tensors, largest first, and on CUDA `memory_rank_<rank>.pickle` is a snapshot for "
            "pytorch.org/memory_viz.",
        ),
    ] = "."
    profile_rollouts: Annotated[
        list[int] | None,
        Field(
            min_length=1,
            description="Numbers of rollouts. While it trains on one of them, each trainer rank records a profile, of "
            "time and memory, with torch's profiler. None: none.",
        ),
    ] = None
    profile_dir: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder for the profiles of `debug.profile_rollouts`. None: `profile` in the run folder.",
        ),
    ] = None
