"""How much a rollout and an optimiser step hold."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from rlscale.config import BatchConfig, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of a prompt and of a response that a plan is made for, and where the figures are from."""

    prompt: int
    response: int
    prompt_from: str = "given"
    response_from: str = "given"

    @property
    def sample(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Counts of one rollout when every sample is as long as the plan assumes."""

    prompts: int
    samples: int
    tokens: int  # prompts included
    trainable_tokens: int
    steps: int  # optimiser steps
    samples_per_step: int
    microbatches_per_rank: int  # in a step
    samples_per_microbatch: int
    microbatch_tokens: int
    ranks: int
    route_bytes: int = 0  # of the routes that engines return with a rollout, in the host's memory


ASSUMED_PROMPT_TOKENS = 512


def assumed_lengths(
    config: RunConfig, *, prompt: int | None = None, response: int | None = None, positions: int | None = None
) -> Lengths:
    """Lengths of a sample: those given, else the limits of the config.

    Args:
        config: resolved.
        prompt: tokens of a prompt. None: `rollout.max_prompt_len`, else a usual one.
        response: tokens of a response. None: `rollout.max_response_len`.
        positions: longest sequence the model takes. None: not known.
    """
    rollout = config.rollout
    response_from, prompt_from = "given", "given"
    if response is None:
        response, response_from = rollout.max_response_len, "rollout.max_response_len, the longest"
    if prompt is None and rollout.max_prompt_len is not None:
        prompt, prompt_from = rollout.max_prompt_len, "rollout.max_prompt_len, the longest"
    elif prompt is None:
        room = (rollout.max_context_len or positions or ASSUMED_PROMPT_TOKENS + response) - response
        prompt = max(1, min(ASSUMED_PROMPT_TOKENS, room, response))
        prompt_from = "a guess, as rollout.max_prompt_len is not set; --prompt-tokens tells it"
    return Lengths(prompt=prompt, response=response, prompt_from=prompt_from, response_from=response_from)


def batches_of(batch: BatchConfig, lengths: Lengths, *, ranks: int, context_ranks: int = 1) -> Batches:
    """The arithmetic of a resolved `batch` group.

    Args:
        batch: resolved, so that its identity holds.
        lengths: of every sample.
        ranks: data-parallel ranks.
        context_ranks: ranks that share a sequence; a packed micro-batch holds as many times the tokens.
    """
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    assert batch.global_batch_size is not None and batch.num_steps_per_rollout is not None, "the resolve step sets them"
    per_step = min(batch.global_batch_size, samples)
    if batch.use_dynamic_batch_size:
        assert batch.max_tokens_per_gpu is not None, "a rule asks for batch.max_tokens_per_gpu"
        fitting = max(1, batch.max_tokens_per_gpu * context_ranks // lengths.sample)
    else:
        fitting = batch.micro_batch_size
    if batch.use_dynamic_batch_size and batch.balance_data:  # each rank packs a share of its own
        share = math.ceil(per_step / ranks)
        per_microbatch, number = min(fitting, share), math.ceil(share / min(fitting, share))
    else:
        per_microbatch, number = _largest(per_step, fitting, ranks=ranks)
    return Batches(
        prompts=batch.rollout_batch_size,
        samples=samples,
        tokens=samples * lengths.sample,
        trainable_tokens=samples * lengths.response,
        steps=batch.num_steps_per_rollout,
        samples_per_step=per_step,
        microbatches_per_rank=number,
        samples_per_microbatch=per_microbatch,
        microbatch_tokens=per_microbatch * lengths.sample,
        ranks=ranks,
    )


def _largest(samples: int, fitting: int, *, ranks: int) -> tuple[int, int]:
    """Samples of the largest micro-batch, and how many micro-batches a rank has, where all are dealt out in turn.

    As `data.schedule` does it: the largest ones are halved until all ranks get as many.
    """
    whole, rest = divmod(samples, fitting)
    sizes = [-fitting] * whole + [-rest] * bool(rest)
    number = math.ceil(len(sizes) / ranks)
    for _ in range(number * ranks - len(sizes)):
        largest = -sizes[0]
        if largest < 2:
            break
        heapq.heapreplace(sizes, -math.ceil(largest / 2))
        heapq.heappush(sizes, -(largest // 2))
    return -sizes[0], number
