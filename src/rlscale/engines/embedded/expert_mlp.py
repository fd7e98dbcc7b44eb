"""Mixture-of-experts MLP: a router selects a few experts for each token.

Shape legend: N tokens (of any number of rows), H hidden width, I width of an expert, E experts, K experts of a token.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.decoder_config import Routing
from rlscale.models.packed_linear import PackedLinear


class ExpertMlp:
    """Computes every expert for every token; experts that are not selected get weight 0.

    Grouping the tokens by expert would be less work, but the last bits of a product depend on its number of rows: the
    result of a token would depend on the experts of its neighbours. Use SGLang for a model with many experts.

    `weights` maps the name of each projection, relative to the layer, to a view of the matrix that is multiplied.
    """

    def __init__(self, routing: Routing, router: Tensor, experts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """`router` is [E, H]. An expert is its gate, up and down projection: [I, H], [I, H] and [H, I]."""
        self._routing, self._router = routing, router
        self.expert_ids_NK: Tensor | None = None  # experts of each token of the last call, in any order
        gates, ups, downs = zip(*experts, strict=True)
        self._gate_up = PackedLinear(torch.cat([*gates, *ups]), None)
        self._down_EHI = torch.stack(downs)
        gate_up = self._gate_up.weight.view(2, len(experts), *gates[0].shape)
        self.weights = {
            f"experts.{i}.{part}_proj.weight": view
            for i in range(len(experts))
            for part, view in (("gate", gate_up[0, i]), ("up", gate_up[1, i]), ("down", self._down_EHI[i]))
        }

    def __call__(self, x_NH: Tensor) -> Tensor:
        num = self._routing.num_experts
        # Columns of the fused product: gates of all experts, then ups of all experts.
        gate, up = self._gate_up(x_NH).view(x_NH.shape[0], 2, num, -1).unbind(1)
        inner_NEI = F.silu(gate) * up * self._weights_NE(x_NH).unsqueeze(-1)
        return torch.bmm(inner_NEI.transpose(0, 1), self._down_EHI.transpose(1, 2)).sum(0)

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""
        self._gate_up.prepare()

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""
        self._gate_up.forget()

    def _weights_NE(self, x_NH: Tensor) -> Tensor:
        """Weight of each expert for each token, 0 for experts that are not selected."""
        probs = F.linear(x_NH, self._router).softmax(dim=-1, dtype=torch.float32)
        top_NK, indices = probs.topk(self._routing.num_per_token, dim=-1)
        self.expert_ids_NK = indices
        if self._routing.normalized:
            top_NK = top_NK / top_NK.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, indices, top_NK).to(x_NH.dtype)
