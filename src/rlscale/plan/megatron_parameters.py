"""Parameters of a rank of a Megatron-core trainer: of the fullest pipeline stage, and those with gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture, count_elements
from rlscale.plan.frozen_parameters import FrozenParameters, ModelPart, NamedParameter, list_parameters
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.mtp_layers import NO_MTP, MtpLayers

UNDIVIDED = ("mlp.gate.weight", "mlp.shared_expert_gate.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Matrices that tensor parallelism does not divide: router, gate of a shared expert, projections to latents."""

_TOWER = (ModelPart.tower, ModelPart.projector)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters of one rank, which data-parallel ranks share in two ways."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts


def rank_parameters(a: Architecture, parallel: ParallelSizes, mtp: MtpLayers) -> RankParameters:
    """Parameters of a rank of the fullest stage."""
    layers = math.ceil(a.num_layers / parallel.pipeline)
    expert = a.expert_parameters * a.num_experts
    whole = {j: count_elements(a.layer_shapes(j)) - (expert if a.has_experts(j) else 0) for j in a.kinds}
    num_with_experts = min(layers, a.num_expert_layers)
    # Every rank of the first stage has the whole vision tower.
    tower = 0 if a.tower is None else a.tower.parameters
    if parallel.pipeline == 1:
        dense = a.root_parameters + a.tower_block_parameters + sum(whole[j] * number for j, number in a.kinds.items())
    else:
        # The fullest stage has one of the tables and as many layers of the largest kind as a stage has.
        dense = a.vocab_size * a.hidden_size + layers * max(whole.values()) + tower
    undivided = tower + mtp.number * _undivided_elements(a, a.num_layers - 1)
    if parallel.pipeline == 1:
        undivided += sum(_undivided_elements(a, j) * number for j, number in a.kinds.items())
    else:
        undivided += layers * max(_undivided_elements(a, j) for j in a.kinds)
    experts = num_with_experts * expert + mtp.expert_parameters(a)
    dense += mtp.parameters(a) - mtp.expert_parameters(a) + _copied_table(a, parallel, mtp)
    return _sharded(dense, experts, parallel, undivided=undivided)


def trained_parameters(
    a: Architecture, parallel: ParallelSizes, mtp: MtpLayers, frozen: FrozenParameters
) -> RankParameters:
    """Parameters with gradients and optimizer state, of a rank of the stage that has most of them."""
    trained = mtp if mtp.is_trained else NO_MTP
    if not frozen.parameters:
        found = rank_parameters(a, parallel, trained)
        # The copy of the embedding is trained also if the layers are frozen.
        copied = _copied_table(a, parallel, mtp) - _copied_table(a, parallel, trained)
        return RankParameters(dense=found.dense + copied / parallel.tensor, experts=found.experts)
    names = {each.name for each in frozen.parameters}
    left = [each for each in list_parameters(a, num_mtp=trained.number) if each.name not in names]
    per_stage = math.ceil(a.num_layers / parallel.pipeline)
    stages = [
        _sharded(
            sum(each.elements for each in own if not each.is_expert),
            sum(each.elements for each in own if each.is_expert),
            parallel,
            undivided=sum(each.elements for each in own if each.name.endswith(UNDIVIDED) or each.part in _TOWER),
        )
        for stage in range(parallel.pipeline)
        if (own := [each for each in left if _is_on(each, stage, parallel, per_stage=per_stage, a=a, mtp=mtp)])
    ]
    return max(stages, key=lambda each: each.total, default=RankParameters(dense=0.0, experts=0.0))


def _is_on(
    each: NamedParameter, stage: int, parallel: ParallelSizes, *, per_stage: int, a: Architecture, mtp: MtpLayers
) -> bool:
    """Whether a stage has a parameter."""
    last = parallel.pipeline - 1
    if each.part in _TOWER:
        return stage == 0
    if each.layer is not None:
        return each.layer // per_stage == stage
    if each.part == ModelPart.decoder and each.name.endswith("embed_tokens.weight"):
        # The last stage has a copy as its output layer, or for multi-token prediction.
        return stage == 0 or (stage == last and (a.tied or mtp.number > 0))
    return stage == last


def _copied_table(a: Architecture, parallel: ParallelSizes, mtp: MtpLayers) -> int:
    """Elements of the copy of the embedding on the last stage, for multi-token prediction."""
    return a.vocab_size * a.hidden_size if mtp.number and parallel.pipeline > 1 else 0


def _undivided_elements(a: Architecture, layer: int) -> int:
    """Elements of the matrices of a layer that every tensor-parallel rank holds whole."""
    outputs = a.num_experts + (a.gated_shared_size > 0) if a.has_experts(layer) else 0
    if a.is_latent:
        outputs += a.q_rank + a.kv_rank + a.rope_dim
    return outputs * a.hidden_size


def _sharded(dense: float, experts: float, parallel: ParallelSizes, *, undivided: float) -> RankParameters:
    """The part of a rank; `undivided` of the dense parameters are on every tensor-parallel rank."""
    ranks = parallel.expert * parallel.expert_tensor
    return RankParameters(dense=(dense - undivided) / parallel.tensor + undivided, experts=experts / ranks)
