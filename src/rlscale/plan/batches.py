"""Sizes of a rollout, of an optimizer step and of a micro-batch."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from rlscale.config import BatchConfig, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of a prompt and of a response that a plan assumes, and the origin of both numbers."""

    prompt: int
    response: int
    prompt_from: str = "given"
    response_from: str = "given"

    @property
    def sample(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Sizes of one rollout in which every sample has the assumed lengths."""

    prompts: int
    samples: int
    tokens: int  # prompts included
    trainable_tokens: int
    steps: int  # optimizer steps of all passes over the rollout
    samples_per_step: int
    microbatches_per_rank: int  # in a step
    samples_per_microbatch: int
    microbatch_tokens: int
    ranks: int
    route_bytes: int = 0  # expert indices that engines return with a rollout, in host memory


DEFAULT_PROMPT_TOKENS = 512


def assume_lengths(
    config: RunConfig, *, prompt: int | None = None, response: int | None = None, positions: int | None = None
) -> Lengths:
    """Lengths of a sample: the arguments, else the limits of the config.

    Args:
        config: resolved.
        prompt: tokens of a prompt. None: `rollout.max_prompt_len`, else DEFAULT_PROMPT_TOKENS if they fit.
        response: tokens of a response. None: `rollout.max_response_len`.
        positions: maximum sequence length of the model. None: unknown.
    """
    rollout, context = config.rollout, config.rollout.max_context_len
    response_from, prompt_from = "given", "given"
    if response is None:
        response, response_from = rollout.max_response_len, "rollout.max_response_len, the longest"
        # The response of a long prompt ends earlier.
        if context is not None and prompt is not None and prompt + response > context:
            response, response_from = max(1, context - prompt), "rollout.max_context_len minus the prompt"
    if prompt is None and rollout.max_prompt_len is not None:
        prompt, prompt_from = rollout.max_prompt_len, "rollout.max_prompt_len, the longest"
        if context is not None and prompt + response > context:
            prompt, prompt_from = max(1, context - response), "rollout.max_context_len minus the response"
    elif prompt is None:
        available = (context or positions or DEFAULT_PROMPT_TOKENS + response) - response
        prompt = max(1, min(DEFAULT_PROMPT_TOKENS, available, response))
        prompt_from = "assumed, as rollout.max_prompt_len is not set; set it with --prompt-tokens"
    return Lengths(prompt=prompt, response=response, prompt_from=prompt_from, response_from=response_from)


def count_batches(
    batch: BatchConfig, lengths: Lengths, *, ranks: int, context_ranks: int = 1, epochs: int = 1
) -> Batches:
    """The sizes of a rollout for a resolved `batch` group.

    Args:
        batch: resolved, so that its sizes are consistent.
        lengths: of every sample.
        ranks: data-parallel ranks.
        context_ranks: ranks that share a sequence; they multiply the tokens of a packed micro-batch.
        epochs: passes over the rollout.
    """
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    assert batch.global_batch_size is not None and batch.num_steps_per_rollout is not None, (
        "the resolve step must set both"
    )
    per_step = min(batch.global_batch_size, samples)
    if batch.use_dynamic_batch_size:
        assert batch.max_tokens_per_gpu is not None, "a rule requires batch.max_tokens_per_gpu"
        capacity = max(1, batch.max_tokens_per_gpu * context_ranks // lengths.sample)
    else:
        capacity = batch.micro_batch_size
    if batch.use_dynamic_batch_size and batch.balance_data:
        # Samples are balanced over the ranks first, then each rank packs its share.
        share = math.ceil(per_step / ranks)
        per_microbatch, number = min(capacity, share), math.ceil(share / min(capacity, share))
    else:
        per_microbatch, number = _largest_microbatch(per_step, capacity, ranks=ranks)
    return Batches(
        prompts=batch.rollout_batch_size,
        samples=samples,
        tokens=samples * lengths.sample,
        trainable_tokens=samples * lengths.response,
        steps=batch.num_steps_per_rollout * epochs,
        samples_per_step=per_step,
        microbatches_per_rank=number,
        samples_per_microbatch=per_microbatch,
        microbatch_tokens=per_microbatch * lengths.sample,
        ranks=ranks,
    )


def _largest_microbatch(samples: int, capacity: int, *, ranks: int) -> tuple[int, int]:
    """Samples of the largest micro-batch, and micro-batches per rank, with a round-robin distribution.

    As in `data.microbatch_plan`: the largest ones are halved until every rank has the same number.
    """
    whole, remainder = divmod(samples, capacity)
    # Negative sizes: heapq is a min-heap.
    sizes = [-capacity] * whole + [-remainder] * bool(remainder)
    number = math.ceil(len(sizes) / ranks)
    for _ in range(number * ranks - len(sizes)):
        largest = -sizes[0]
        if largest < 2:
            break
        heapq.heapreplace(sizes, -math.ceil(largest / 2))
        heapq.heappush(sizes, -(largest // 2))
    return -sizes[0], number
