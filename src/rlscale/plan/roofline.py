"""The least time that a rollout and its training can take: arithmetic at the peak rate, bytes at the full bandwidth.

No run reaches it: kernels come to a half or less of the peak, and responses differ in length. It tells which part is
bound by what, and what a change of the config can gain at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture
from rlscale.config import (
    ComputeDtype,
    EngineKind,
    LossType,
    RunConfig,
    TisType,
    TrainBackendName,
    compares_policies,
)
from rlscale.plan.activations import FLOAT32
from rlscale.plan.batches import Batches, Lengths
from rlscale.plan.engine_memory import EngineMemory
from rlscale.plan.hardware import DTYPE_BYTES, Hardware
from rlscale.plan.megatron_activations import Parallel
from rlscale.plan.placement import Layout

ADAM_TRAFFIC = 28
"""Bytes that an optimiser step reads and writes for each parameter: weight, two states and gradient, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a step: what it is, its least time, and what bounds that."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Least times in seconds."""

    parts: tuple[Part, ...]
    overlaps: bool  # generation and training run side by side

    @property
    def seconds(self) -> float:
        """Of one rollout and its training."""
        training = sum(part.seconds for part in self.parts if part.name not in _GENERATION + _SYNC)
        generation = sum(part.seconds for part in self.parts if part.name in _GENERATION)
        sync = sum(part.seconds for part in self.parts if part.name in _SYNC)
        return sync + (max(training, generation) if self.overlaps else training + generation)


_GENERATION = ("read prompts", "write responses")
_SYNC = ("weight sync",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the least times follow from."""

    a: Architecture
    reference: Architecture | None
    lengths: Lengths
    batches: Batches
    layout: Layout
    engine: EngineMemory | None
    hardware: Hardware
    dtype: ComputeDtype
    sync_bytes: float
    recompute: bool
    is_one_node: bool

    @property
    def flops(self) -> float:
        """Of one accelerator, per second."""
        return self.hardware.flops[self.dtype]

    @property
    def link(self) -> float:
        return self.hardware.link_bandwidth if self.is_one_node else self.hardware.network_bandwidth


def least_times(config: RunConfig, setting: Setting) -> Roofline:
    """The floor of one rollout of a resolved config."""
    generates = config.algo.loss_type != LossType.sft_loss and setting.engine is not None
    parts = _generation(config, setting) if generates else []
    parts += _training(config, setting) if setting.layout.num_trainers else []
    if setting.sync_bytes:
        parts.append(Part(name="weight sync", seconds=setting.sync_bytes / setting.link, bound="bandwidth of the link"))
    return Roofline(parts=tuple(parts), overlaps=config.rollout.max_staleness > 0)


def _generation(config: RunConfig, setting: Setting) -> list[Part]:
    engine, lengths, a = setting.engine, setting.lengths, setting.a
    assert engine is not None, "a run that generates has engines"
    gpus = setting.layout.num_engines * engine.gpus
    # A prompt is read once for all of its samples.
    reading = setting.batches.prompts * a.forward_flops(tokens=lengths.prompt, context=lengths.prompt / 2, logit_rows=1)
    at_once = running_at_once(config, engine, lengths, samples=setting.batches.samples, layout=setting.layout)
    waves = math.ceil(setting.batches.samples / setting.layout.num_engines / at_once)
    context = lengths.prompt + lengths.response / 2
    compute = at_once * a.forward_flops(tokens=1, context=context, logit_rows=1) / (engine.gpus * setting.flops)
    weights = engine.weights * share_of_weights(a, at_once)
    memory = (weights + at_once * context * engine.bytes_per_token) / setting.hardware.memory_bandwidth
    return [
        Part(name="read prompts", seconds=reading / (gpus * setting.flops), bound="arithmetic"),
        Part(
            name="write responses",
            seconds=waves * lengths.response * max(compute, memory),
            bound="arithmetic" if compute > memory else "bandwidth of the memory",
        ),
    ]


def running_at_once(config: RunConfig, engine: EngineMemory, lengths: Lengths, *, samples: int, layout: Layout) -> int:
    """Samples that one engine works on at once: those it gets, if its cache and its limits allow."""
    share = math.ceil(samples / layout.num_engines)
    limit = (
        config.rollout.num_slots if config.rollout.engine == EngineKind.embedded else config.sglang.server_concurrency
    )
    return max(1, min(share, limit, engine.cache_tokens // lengths.sample))


def share_of_weights(a: Architecture, tokens: int) -> float:
    """Part of the weights that `tokens` tokens need: of the experts, those that one of them chooses."""
    if not a.num_experts:
        return 1.0
    untouched = (1 - a.experts_per_token / a.num_experts) ** tokens
    idle = (a.parameters - a.active_parameters) / (1 - a.experts_per_token / a.num_experts)
    return 1 - untouched * idle / a.parameters


def _training(config: RunConfig, setting: Setting) -> list[Part]:
    lengths, batches, a = setting.lengths, setting.batches, setting.a
    rows = batches.trainable_tokens
    forward = a.forward_flops(tokens=batches.tokens, context=lengths.sample / 2, logit_rows=rows)
    # The backward pass is two forward passes; recomputed layers are one more, logits excepted.
    again = a.forward_flops(tokens=batches.tokens, context=lengths.sample / 2, logit_rows=0) if setting.recompute else 0
    traffic = _traffic(config, setting)
    parts = []
    if needs_old_logprobs(config):
        parts.append(_work("old logprobs", forward, moved=traffic.scoring, setting=setting))
    if setting.reference is not None:
        scored = setting.reference.forward_flops(tokens=batches.tokens, context=lengths.sample / 2, logit_rows=rows)
        parts.append(_work("reference logprobs", scored, moved=traffic.scoring, setting=setting))
    parts.append(_work("forward and backward", 3 * forward + again, moved=traffic.training, setting=setting))
    touched = batches.steps * ADAM_TRAFFIC * a.parameters / setting.layout.num_trainers
    seconds = touched / setting.hardware.memory_bandwidth
    return [*parts, Part(name="optimizer", seconds=seconds, bound="bandwidth of the memory")]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traffic:
    """Bytes that a rank sends for weights and gradients during all steps of a rollout."""

    scoring: float  # a pass without gradient
    training: float


def _traffic(config: RunConfig, setting: Setting) -> _Traffic:
    """FSDP gathers all weights for each pass over a micro-batch; Megatron keeps them and reduces gradients only."""
    ranks, batches = setting.layout.num_trainers, setting.batches
    b = DTYPE_BYTES[setting.dtype]
    if config.train.backend == TrainBackendName.megatron:
        parallel = Parallel.of(config.megatron, ranks)
        copies = parallel.data * parallel.context
        own = setting.a.parameters / (parallel.tensor * parallel.pipeline)
        return _Traffic(scoring=0.0, training=batches.steps * own * (FLOAT32 + b) * (copies - 1) / copies)
    whole = setting.a.parameters * (ranks - 1) / ranks
    passes = batches.steps * batches.microbatches_per_rank
    return _Traffic(scoring=whole * passes * b, training=whole * (2 * passes * b + batches.steps * FLOAT32))


def _work(name: str, flops: float, *, moved: float, setting: Setting) -> Part:
    """Arithmetic, with weights and gradients on their way beside it."""
    compute, traffic = flops / (setting.layout.num_trainers * setting.flops), moved / setting.link
    bound = "arithmetic" if compute >= traffic else "bandwidth between ranks"
    return Part(name=name, seconds=max(compute, traffic), bound=bound)


def needs_old_logprobs(config: RunConfig) -> bool:
    """Whether the trainer makes a pass of its own for the logprobs of the policy before the first step."""
    algo = config.algo
    if not compares_policies(algo) or algo.use_rollout_logprobs:
        return False
    normalized = algo.use_tis and algo.tis_type == TisType.mis and algo.mis.normalize
    several = (config.batch.num_steps_per_rollout or 1) > 1
    return several or normalized or algo.kl_coef > 0 or not config.train.reuse_logprobs
