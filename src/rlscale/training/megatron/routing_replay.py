"""Hooks in Megatron-core's routers for routing replay; see `rlscale.training.modules.expert_routing`.

Shape legend: T positions of this rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlscale.config import AlgoConfig
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.modules.expert_routing import RouterHook, RoutingReplay, make_routing_replay, replayed_key
from rlscale.training.packing.token_rows import TokenRows

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron-core's choice of experts: from router scores to the scores and ids of the chosen experts. Both [T, K]"""


def hook_routers(
    model: MegatronModel, algo: AlgoConfig, *, dims: ParallelDims, device: torch.device
) -> RoutingReplay | None:
    """Installs hooks in the routers of all layers of this rank; None: the config replays no routes."""
    if replayed_key(algo) is None:
        return None
    # With sequence parallelism the tensor-parallel ranks divide the positions between layers.
    shares = [dims.tensor_group] if model.config.sequence_parallel and dims.tensor_size > 1 else []
    layers = [layer for chunk in model.chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    hooks = [MegatronRouterHook(layer, index=i, shares=shares) for i, layer in enumerate(layers)]
    groups = [*shares, *([] if dims.context is None else [dims.context.group])]
    return make_routing_replay(algo, hooks, device=device, num_layers=int(model.config.num_layers), groups=groups)


class MegatronRouterHook(RouterHook):
    """Replaces the `RouterReplay` of one of Megatron-core's routers.

    Args:
        layer: of the decoder.
        index: as in `RouterHook`.
        shares: the group of ranks that divide the positions between layers, if any.

    Example:
        router.router_replay = hook
    """

    def __init__(self, layer: Any, *, index: int, shares: list[dist.ProcessGroup]) -> None:
        router = layer.mlp.router
        number, num_chosen, num_experts = int(layer.layer_number) - 1, int(router.topk), int(router.num_experts)
        super().__init__(index=index, layer=number, num_chosen=num_chosen, num_experts=num_experts)
        self._shares = shares
        router.router_replay = self
        # A pre-hook of the layer also runs when the layer is recomputed, which is the only way to know the micro-batch
        # then.
        layer.register_forward_pre_hook(self._remember_tokens, with_kwargs=True)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the chosen experts. Both [T, K]. Megatron-core's router calls it by this name."""
        assert default_compute_topk is not None, "Megatron-core passes its own function"
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self.choose(own)
        return (values, own) if chosen is None else (scores.gather(1, chosen), chosen)

    def _remember_tokens(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        params = kwargs.get("packed_seq_params")
        if params is None or params.batch_rows is None:
            self.token_rows = None
            return
        at = params.batch_rows
        # With sequence parallelism a router sees an equal, contiguous part of the positions.
        for group in self._shares:
            at = np.split(at, dist.get_world_size(group))[dist.get_rank(group)]
        self.token_rows = TokenRows.from_positions(at)
