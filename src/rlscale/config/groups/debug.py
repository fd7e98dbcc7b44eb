"""Group `debug`: warnings, dump files and partial runs."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class DebugConfig(ConfigGroup):
    """Warnings, dump files, profiles and partial runs."""

    logprob_diff_warn: Annotated[float | None, Field(gt=0)] = None
    """Warn if the mean absolute difference between trainer and engine logprobs exceeds this. None: 1e-4 with
    `train.dtype=float32`, 0.05 with `bfloat16`, and no warning with `rollout.weight_precision` or if
    `rollout.pause_mode=in_place` mixes KV caches of several weight versions.
    """

    # Rollout dumps and partial runs.
    save_rollout_data: Annotated[str | None, Field(min_length=1)] = None
    """Path template of a JSONL file with all samples of a rollout; must contain `{rollout_id}`, which is
    `eval_<weight version>` for the samples of an evaluation. None: not written.
    """

    load_rollout_data: Annotated[str | None, Field(min_length=1)] = None
    """Path template of JSONL files written by `debug.save_rollout_data`, with `{rollout_id}`: train on their samples
    instead of generating. Implies `debug.train_only`. None: generate.
    """

    rollout_only: bool = False
    """Only generate and score, without a trainer. Cannot be combined with `debug.train_only`."""

    train_only: bool = False
    """Only train, without engines and evaluation. Needs `debug.load_rollout_data` or `algo.loss_type=sft_loss`."""

    # Dumps of training batches.
    save_train_data: Annotated[str | None, Field(min_length=1)] = None
    """Path template of a safetensors file with the whole training batch of a rollout, including logprobs of trainer and
    engine, advantages, returns and values; must contain `{rollout_id}`. None: not written.
    """

    dump_details: Annotated[str | None, Field(min_length=1)] = None
    """Folder that sets `debug.save_rollout_data` and `debug.save_train_data` and also gets the tokenizer. None: not
    written.
    """

    # Memory and profiles.
    memory_snapshot_dir: Annotated[str, Field(min_length=1)] = "."
    """Folder for memory reports of a trainer rank that runs out of memory, and of all ranks and the driver when
    `snapshot_memory` in the run folder is touched or the driver gets SIGUSR2: `memory_rank_<rank>.json` lists tensors
    and objects by size and, on CUDA, `memory_rank_<rank>.pickle` is a snapshot for pytorch.org/memory_viz. Names of
    reports on demand have the time after `memory_`; that of the driver lists the processes of the run.
    """

    profile_rollouts: Annotated[list[int] | None, Field(min_length=1)] = None
    """Numbers of the rollouts whose training each rank records with the torch profiler (time and memory). None: no
    profile.
    """

    profile_dir: Annotated[str | None, Field(min_length=1)] = None
    """Folder of the profiles of `debug.profile_rollouts`. None: `profile` in the run folder."""
