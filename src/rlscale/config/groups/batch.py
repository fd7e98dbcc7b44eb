"""Group `batch`: how many samples make a rollout, an optimiser step and a micro-batch."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class BatchConfig(ConfigGroup):
    """Batch sizes; rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""

    rollout_batch_size: Annotated[int, Field(gt=0, description="Prompts per rollout. Must be set.")]
    n_samples_per_prompt: Annotated[
        int, Field(gt=0, description="Answers sampled for each prompt: the size of a group.")
    ] = 1
    global_batch_size: Annotated[
        int | None,
        Field(
            gt=0,
            description="Samples per optimiser step over all data-parallel ranks. None: "
            "`rollout_batch_size * n_samples_per_prompt / num_steps_per_rollout`.",
        ),
    ] = None
    num_steps_per_rollout: Annotated[
        int | None,
        Field(
            gt=0,
            description="Optimiser steps per rollout. None: "
            "`rollout_batch_size * n_samples_per_prompt / global_batch_size`, 1 when that is None too.",
        ),
    ] = None
    micro_batch_size: Annotated[
        int,
        Field(gt=0, description="Samples per micro-batch of a rank. Ignored with `batch.use_dynamic_batch_size`."),
    ] = 1
    balance_data: Annotated[
        bool,
        Field(
            description="Balance the ranks by estimated FLOPs: micro-batches of `batch.micro_batch_size`, or, with "
            "`batch.use_dynamic_batch_size`, samples before they are packed, then by tokens too. Else in order."
        ),
    ] = False
    use_dynamic_batch_size: Annotated[
        bool,
        Field(description="Pack samples into micro-batches of at most `batch.max_tokens_per_gpu` tokens."),
    ] = False
    max_tokens_per_gpu: Annotated[
        int | None,
        Field(
            gt=0,
            description="Tokens per packed micro-batch; a longer sample is alone in its own. Needed with "
            "`batch.use_dynamic_batch_size`, ignored without it. None: not set.",
        ),
    ] = None
    log_probs_max_tokens_per_gpu: Annotated[
        int | None,
        Field(
            gt=0,
            description="Tokens per micro-batch of passes without gradient, which need less memory: logprobs of old "
            "policy, reference and teacher, and values. None: `batch.max_tokens_per_gpu`.",
        ),
    ] = None
