"""Roofline of a run: a lower bound of the time of a rollout and its training, at peak rate and full bandwidth.

No run reaches it: kernels get half of the peak or less, and responses differ in length. It shows the bottleneck of each
part, and the largest gain that a change of the config can bring.
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
from rlscale.config.groups.algo import OpdKl
from rlscale.config.rules import keeps_old_policies
from rlscale.plan.activations import FLOAT32
from rlscale.plan.adapter_sizes import AdapterSpec
from rlscale.plan.batches import Batches, Lengths
from rlscale.plan.engine_memory import EngineMemory
from rlscale.plan.frozen_parameters import ModelPart, find_frozen
from rlscale.plan.hardware import DTYPE_BYTES, Hardware
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.placement import Layout
from rlscale.plan.trained_model import TrainedModel

ADAM_TRAFFIC = 28
"""Bytes per parameter that an optimizer step reads and writes: weight, two states and gradient, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """One part of a step: its name, the lower bound of its time, and its bottleneck."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Lower bounds in seconds."""

    parts: tuple[StepPart, ...]
    overlaps: bool  # generation and training run concurrently
    separates: bool = False  # prefill and decode run concurrently, on separate engines

    @property
    def seconds(self) -> float:
        """Lower bound of one rollout and its training."""
        training = sum(part.seconds for part in self.parts if part.name not in _GENERATION + _SYNC)
        generating = [part.seconds for part in self.parts if part.name in _GENERATION]
        generation = max(generating, default=0.0) if self.separates else sum(generating)
        sync = sum(part.seconds for part in self.parts if part.name in _SYNC)
        return sync + (max(training, generation) if self.overlaps else training + generation)


_GENERATION = ("prefill", "decode")
_SYNC = ("weight sync",)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineInputs:
    """Inputs of the roofline model."""

    a: Architecture
    reference: Architecture | None
    lengths: Lengths
    batches: Batches
    layout: Layout
    engine: EngineMemory | None
    hardware: Hardware
    dtype: ComputeDtype
    sync_bytes: float
    trained: TrainedModel | None  # None: no trainer
    recompute: bool
    is_one_node: bool

    @property
    def flops(self) -> float:
        """Operations of one accelerator per second."""
        return self.hardware.flops[self.dtype]

    @property
    def link(self) -> float:
        """Bandwidth between ranks, in bytes per second."""
        return self.hardware.link_bandwidth if self.is_one_node else self.hardware.network_bandwidth


def compute_roofline(config: RunConfig, setting: RooflineInputs) -> Roofline:
    """The roofline of one rollout of a resolved config."""
    generates = config.algo.loss_type != LossType.sft_loss and setting.engine is not None
    parts = _generation(config, setting) if generates else []
    parts += _training(config, setting) if setting.layout.num_trainers else []
    if setting.sync_bytes:
        parts.append(StepPart(name="weight sync", seconds=setting.sync_bytes / setting.link, bound="link bandwidth"))
    separates = setting.layout.num_prefill_engines is not None
    return Roofline(parts=tuple(parts), overlaps=config.rollout.max_staleness > 0, separates=separates)


def _generation(config: RunConfig, setting: RooflineInputs) -> list[StepPart]:
    engine, lengths, a = setting.engine, setting.lengths, setting.a
    assert engine is not None, "a run that generates needs engines"
    layout = setting.layout
    gpus = layout.num_engine_gpus
    if layout.num_prefill_engines:
        gpus = layout.num_prefill_engines * layout.engine_gpus(0)
    # Prefill: a prompt is computed once for all of its samples.
    cost = a.forward_cost
    mean = cost.count_pairs(lengths.prompt) / max(1, lengths.prompt)
    reading = setting.batches.prompts * a.forward_flops(tokens=lengths.prompt, context=mean, logit_rows=1)
    num_running = max_running(config, engine, lengths, samples=setting.batches.samples, layout=setting.layout)
    # Samples beyond that wait for the next wave.
    waves = math.ceil(setting.batches.samples / layout.num_decode_engines / num_running)
    # Half of the response is in the cache on average; a sliding window reads the end of it.
    context = (cost.count_pairs(lengths.sample) - cost.count_pairs(lengths.prompt)) / max(1, lengths.response)
    compute = num_running * a.forward_flops(tokens=1, context=context, logit_rows=1) / (engine.gpus * setting.flops)
    # The embedded engine dequantises its weights and reads those.
    is_dense = engine.kind == EngineKind.embedded
    weights = a.parameters * DTYPE_BYTES[setting.dtype] if is_dense else engine.weights
    weights *= weight_fraction(a, num_running)
    memory = (weights + num_running * context * engine.bytes_per_token) / setting.hardware.memory_bandwidth
    return [
        StepPart(name="prefill", seconds=reading / (gpus * setting.flops), bound="compute"),
        StepPart(
            name="decode",
            seconds=waves * lengths.response * max(compute, memory),
            bound="compute" if compute > memory else "memory bandwidth",
        ),
    ]


def max_running(config: RunConfig, engine: EngineMemory, lengths: Lengths, *, samples: int, layout: Layout) -> int:
    """Samples that one engine decodes concurrently: its share, limited by its cache and the config."""
    share = math.ceil(samples / layout.num_decode_engines)
    limit = (
        config.rollout.num_slots if config.rollout.engine == EngineKind.embedded else config.sglang.server_concurrency
    )
    return max(1, min(share, limit, engine.cache_tokens // lengths.sample))


def weight_fraction(a: Architecture, tokens: int) -> float:
    """Fraction of the weights that `tokens` tokens read: of the experts only those that a token chooses."""
    if a.experts_per_token >= a.num_experts:  # dense, or every token uses every expert
        return 1.0
    # Probability that none of the tokens chooses a given expert, with a uniform router.
    untouched = (1 - a.experts_per_token / a.num_experts) ** tokens
    idle = (a.parameters - a.active_parameters) / (1 - a.experts_per_token / a.num_experts)
    return 1 - untouched * idle / a.parameters


def _training(config: RunConfig, setting: RooflineInputs) -> list[StepPart]:
    lengths, batches, a = setting.lengths, setting.batches, setting.a
    rows = batches.trainable_tokens
    mean = a.forward_cost.count_pairs(lengths.sample) / lengths.sample
    forward = a.forward_flops(tokens=batches.tokens, context=mean, logit_rows=rows)
    traffic = _traffic(config, setting)
    parts = []
    if needs_old_logprobs(config):
        parts.append(_overlapped("old logprobs", forward, moved=traffic.scoring, setting=setting))
    if setting.reference is not None:
        mean_of_reference = setting.reference.forward_cost.count_pairs(lengths.sample) / lengths.sample
        scored = setting.reference.forward_flops(tokens=batches.tokens, context=mean_of_reference, logit_rows=rows)
        parts.append(_overlapped("reference logprobs", scored, moved=traffic.scoring, setting=setting))
    assert setting.trained is not None, "there is a trainer"
    mtp = setting.trained.mtp.step_flops(a, tokens=batches.tokens, context=mean, logit_rows=rows)
    trained = (forward + _backward_flops(config, setting) + mtp) * config.algo.ppo_epochs
    parts.append(_overlapped("forward and backward", trained, moved=traffic.training, setting=setting))
    touched = batches.steps * ADAM_TRAFFIC * setting.trained.trained / setting.layout.num_trainers
    seconds = touched / setting.hardware.memory_bandwidth
    return [*parts, StepPart(name="optimizer", seconds=seconds, bound="memory bandwidth")]


def _backward_flops(config: RunConfig, setting: RooflineInputs) -> float:
    """Operations of the backward pass over a rollout: gradients of inputs, and of the weights that are trained.

    Layers below the first one that is trained have none. A recomputed layer costs one more forward pass.
    """
    a, tokens, cost = setting.a, setting.batches.tokens, setting.a.forward_cost
    frozen, adapters = find_frozen(a, config.train), AdapterSpec.from_config(config.train)
    reached = (a.num_layers - frozen.first_layer) / a.num_layers
    fixed = [each for each in frozen.of_parts(ModelPart.decoder) if each.layer is not None]
    used = a.experts_per_token / max(1, a.num_experts)
    trained = cost.per_token - 2 * sum(each.elements * (used if each.is_expert else 1) for each in fixed)
    attention = cost.per_pair * cost.count_pairs(setting.lengths.sample) / setting.lengths.sample
    layers = cost.per_token * reached + (0 if adapters.rank else trained) + 2 * attention * reached
    if setting.recompute:
        layers += (cost.per_token + attention) * reached
    # Adapters are small matrices next to those of the layers: forward, and both gradients.
    layers += 6 * adapters.elements(a)
    output = "embed_tokens.weight" if a.tied else "lm_head.weight"
    is_fixed = adapters.rank > 0 or any(each.name.endswith(output) for each in frozen.parameters)
    of_rows = cost.per_logit_row * ((reached > 0) + (not is_fixed))
    return tokens * layers + setting.batches.trainable_tokens * of_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traffic:
    """Bytes of weights and gradients that a rank sends during all steps of a rollout."""

    scoring: float  # one pass without gradient
    training: float


def _traffic(config: RunConfig, setting: RooflineInputs) -> _Traffic:
    """FSDP gathers all weights for every pass over a micro-batch; Megatron-core only reduces gradients."""
    ranks, batches, a = setting.layout.num_trainers, setting.batches, setting.a
    b = DTYPE_BYTES[setting.dtype]
    dense, experts = _trained_elements(config, a)
    if config.train.backend == TrainBackendName.megatron:
        parallel = ParallelSizes.from_config(config.megatron, ranks)
        copies = parallel.data * parallel.context
        expert_parts = parallel.expert_tensor * parallel.expert * parallel.pipeline
        expert_copies = max(1, ranks // expert_parts)
        own = dense / (parallel.tensor * parallel.pipeline) * (copies - 1) / copies
        own += experts / expert_parts * (expert_copies - 1) / expert_copies
        return _Traffic(scoring=0.0, training=batches.steps * own * (FLOAT32 + b))
    gathered, reduced = (number * (ranks - 1) / ranks for number in (a.parameters, dense + experts))
    passes = batches.steps * batches.microbatches_per_rank
    training = gathered * 2 * passes * b + reduced * batches.steps * FLOAT32
    return _Traffic(scoring=gathered * passes * b / config.algo.ppo_epochs, training=training)


def _trained_elements(config: RunConfig, a: Architecture) -> tuple[int, int]:
    """Elements with gradients, outside and inside of experts. Those of adapters are outside."""
    adapters = AdapterSpec.from_config(config.train)
    if adapters.rank:
        return adapters.elements(a), 0
    experts = a.expert_parameters * a.num_experts * a.num_expert_layers
    frozen = find_frozen(a, config.train).of_parts()
    fixed = sum(each.elements for each in frozen if each.is_expert)
    return a.parameters - experts - sum(each.elements for each in frozen if not each.is_expert), experts - fixed


def _overlapped(name: str, flops: float, *, moved: float, setting: RooflineInputs) -> StepPart:
    """A part that computes and communicates concurrently; the slower of both bounds it."""
    compute, traffic = flops / (setting.layout.num_trainers * setting.flops), moved / setting.link
    bound = "compute" if compute >= traffic else "bandwidth between ranks"
    return StepPart(name=name, seconds=max(compute, traffic), bound=bound)


def needs_old_logprobs(config: RunConfig) -> bool:
    """Whether the trainer runs a separate pass for the logprobs of the policy before the first step.

    The same as `training.prepare.needs_old_pass`, whose module imports torch.
    """
    algo = config.algo
    if not compares_policies(algo):
        return False
    several = (config.batch.num_steps_per_rollout or 1) * algo.ppo_epochs > 1
    if algo.use_rollout_logprobs:
        return algo.use_rollout_entropy and several
    normalized = algo.use_tis and algo.tis_type == TisType.mis and algo.mis.normalize
    before_loss = algo.kl_coef > 0 or (algo.opd_kl_coef > 0 and algo.opd_kl == OpdKl.sampled)
    return several or normalized or before_loss or keeps_old_policies(config) or not config.train.reuse_logprobs
