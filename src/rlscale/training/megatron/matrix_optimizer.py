"""Muon for a Megatron-core model: matrices are orthogonalised as Hugging Face stores them.

Megatron-core keeps queries, keys and values in one tensor, and gate and up projection in another, and shards both over
tensor-parallel ranks. A step gathers the shards of a matrix, divides them as the weight conversion does, and takes this
rank's shard of the results. So the update equals that of FSDP2 in every parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import _get_param_groups
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn

from rlscale.architectures.weight_names import TensorLayout
from rlscale.config import OptimConfig
from rlscale.training.megatron.hf_mapping.mapping import MappedWeight, shard_of_rank
from rlscale.training.megatron.hf_mapping.sharding import (
    HeadSizes,
    Shard,
    SliceReader,
    hf_from_shards,
    shard_from_hf,
)
from rlscale.training.optim.muon import MUON, MuonAdamW, muon_state, orthogonalize, rate_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout:
    """Layout and shard of a parameter. A replicated one is its only shard."""

    layout: TensorLayout
    shard: Shard
    group: dist.ProcessGroup | None  # of the ranks that hold the shards; None: this rank has the whole matrix

    @classmethod
    def from_mapped(cls, mapped: MappedWeight) -> MatrixLayout:
        """The layout of a weight on this rank."""
        layout, shard = mapped.weight.layout, shard_of_rank(mapped)
        if layout == TensorLayout.whole or shard.count == 1:
            shard, group = Shard(), None
        elif mapped.expert is None:
            group = parallel_state.get_tensor_model_parallel_group()
        else:
            group = parallel_state.get_expert_tensor_parallel_group()
        if mapped.expert is not None and layout == TensorLayout.gated:
            # transformers stacks gate and up projection of an expert, and Muon on FSDP2 takes them as one matrix.
            layout = TensorLayout.gated_fused
        return cls(layout=layout, shard=shard, group=group)

    def gather(self, shard: Tensor) -> list[Tensor]:
        """The shards of all ranks that hold one; a collective of these ranks."""
        if self.group is None:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self.shard.count)]
        dist.all_gather(shards, shard.contiguous(), group=self.group)
        return shards


class MegatronMuon(MuonAdamW):
    """Muon over shards of Megatron-core's tensors.

    Invariant: `step` is a collective of the tensor-parallel ranks; each of them orthogonalises the whole matrix.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        momentum: float,
        layouts: Mapping[Tensor, MatrixLayout],
        sizes: HeadSizes,
    ) -> None:
        super().__init__(groups, momentum=momentum, adam={})
        # By position: Megatron-core replaces parameters of 16 bits by their float32 copies.
        self._layouts = [[layouts[parameter] for parameter in group["params"]] for group in self.param_groups]
        self._sizes = sizes

    def _updates(
        self, index: int, parameters: Sequence[Tensor], directions: Sequence[Tensor]
    ) -> list[tuple[Tensor, float]]:
        layouts = self._layouts[index]
        assert len(parameters) == len(layouts), "gradient buffers give every parameter a gradient"
        return [(self._update(each, layout), 1.0) for each, layout in zip(directions, layouts, strict=True)]

    def _update(self, direction: Tensor, layout: MatrixLayout) -> Tensor:
        """The shard of this rank of the orthogonalised matrices, each scaled by its factor."""
        matrices = hf_from_shards(layout.layout, layout.gather(direction), sizes=self._sizes)
        updates = [SliceReader.from_tensor(orthogonalize(each) * rate_factor(each)) for each in matrices]
        return shard_from_hf(layout.layout, updates, shard=layout.shard, sizes=self._sizes)


def fill_momentum(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Creates the state of every matrix, which else exists only after its first step. Megatron-core passes a config."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = muon_state(parameter)


def make_matrix_parts(
    chunks: Sequence[nn.Module],
    *,
    optim: OptimConfig,
    config: Any,
    overrides: Mapping[Any, Any],
    layouts: Mapping[Tensor, MatrixLayout],
    sizes: HeadSizes,
) -> list[Any]:
    """Megatron-core's optimisers over the matrices: one for dense layers and one for experts that ranks divide.

    Args:
        chunks: of the rank, with gradient buffers.
        optim: rate, momentum and weight decay.
        config: Megatron-core's, of all parts.
        overrides: settings of some parameters, as for `get_megatron_optimizer`.
        layouts: of the matrices that Muon steps.
        sizes: of the heads.
    """
    with only_trained(chunks, set(layouts)):
        groups = _get_param_groups(list(chunks), config, overrides)
    parts = []
    for is_expert in (False, True):
        own = [group for group in groups if group["is_expert_parallel"] == is_expert]
        if not own:
            continue
        for group in own:
            group |= {MUON: True, "lr": 0.0, "weight_decay": optim.weight_decay}
        inner = MegatronMuon(own, momentum=optim.muon_momentum, layouts=layouts, sizes=sizes)
        if config.bf16:
            part = Float16OptimizerWithFloat16Params(inner, config, None, fill_momentum)
        else:
            part = FP32Optimizer(inner, config, fill_momentum)
        # As in the parts that Megatron-core makes: the ranks whose gradients make up the norm.
        part.tp_group = parallel_state.get_tensor_model_parallel_group()
        part.grad_stats_parallel_group = (
            parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            if is_expert
            else parallel_state.get_model_parallel_group()
        )
        parts.append(part)
    return parts


@contextmanager
def only_trained(chunks: Sequence[nn.Module], chosen: set[Tensor]) -> Iterator[None]:
    """Context in which no other parameter requires a gradient: Megatron-core builds an optimiser over those that do."""
    others = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad and p not in chosen]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
