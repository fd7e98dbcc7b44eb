"""Group `batch`: sizes of rollouts, optimiser steps and micro-batches."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class BatchConfig(ConfigGroup):
    """Batch sizes; rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""

    # Rollout and optimiser step.
    rollout_batch_size: Annotated[int, Field(gt=0)]
    """Number of prompts per rollout. Required."""

    n_samples_per_prompt: Annotated[int, Field(gt=0)] = 1
    """Number of samples per prompt (the group size)."""

    global_batch_size: Annotated[int | None, Field(gt=0)] = None
    """Samples per optimiser step over all data-parallel ranks. None: `rollout_batch_size * n_samples_per_prompt /
    num_steps_per_rollout`.
    """

    num_steps_per_rollout: Annotated[int | None, Field(gt=0)] = None
    """Optimiser steps per rollout. None: `rollout_batch_size * n_samples_per_prompt / global_batch_size`, or 1 if that
    is None too.
    """

    # Micro-batches.
    micro_batch_size: Annotated[int, Field(gt=0)] = 1
    """Samples per micro-batch of a rank. No effect with `batch.use_dynamic_batch_size`."""

    balance_data: bool = False
    """Balance the ranks by the model's estimated FLOPs. Moves whole micro-batches of `batch.micro_batch_size`; with
    `batch.use_dynamic_batch_size`, moves samples before packing and then balances tokens as well. false: samples are
    assigned in order.
    """

    use_dynamic_batch_size: bool = False
    """Pack samples into micro-batches of at most `batch.max_tokens_per_gpu` tokens."""

    max_tokens_per_gpu: Annotated[int | None, Field(gt=0)] = None
    """Maximum number of tokens per packed micro-batch; a longer sample gets its own micro-batch. Required with
    `batch.use_dynamic_batch_size`, no effect without it. None: not set.
    """

    log_probs_max_tokens_per_gpu: Annotated[int | None, Field(gt=0)] = None
    """Maximum number of tokens per packed micro-batch of passes without gradient: logprobs of old policy, reference and
    teacher, and values. These passes need less memory. None: `batch.max_tokens_per_gpu`. No effect without
    `batch.use_dynamic_batch_size`.
    """
