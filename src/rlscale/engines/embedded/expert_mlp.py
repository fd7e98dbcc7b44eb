"""A layer of experts: a router chooses a few MLPs for each token.

Shape legend: N tokens (of any number of rows), H hidden width, I width of an expert, E experts, K experts of a token.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.decoder_config import Routing
from rlscale.models.packed_linear import PackedLinear


class ExpertMlp:
    """Every expert for every token, those that were not chosen with weight 0.

    Collecting the tokens of an expert would be less work, but the bits of a product change with its number of rows: a
    token's result would depend on what its neighbours chose. A model with many experts belongs on SGLang.

    `weights` maps the name of each part, below the layer's own, to a view of what is multiplied.
    """

    def __init__(self, routing: Routing, router: Tensor, experts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """`router` is [E, H]. An expert is its gate, up and down projection: [I, H], [I, H] and [H, I]."""
        self._routing, self._router = routing, router
        self.chosen_NK: Tensor | None = None  # experts of each token of the last call, in no particular order
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
        gate, up = self._gate_up(x_NH).view(x_NH.shape[0], 2, num, -1).unbind(1)
        inner_NEI = F.silu(gate) * up * self._weights_NE(x_NH).unsqueeze(-1)
        return torch.bmm(inner_NEI.transpose(0, 1), self._down_EHI.transpose(1, 2)).sum(0)

    def prepare(self) -> None:
        """See `PackedLinear`."""
        self._gate_up.prepare()

    def forget(self) -> None:
        """See `PackedLinear`."""
        self._gate_up.forget()

    def _weights_NE(self, x_NH: Tensor) -> Tensor:
        """Weight of each expert for each token, 0 where it was not chosen."""
        shares = F.linear(x_NH, self._router).softmax(dim=-1, dtype=torch.float32)
        chosen, indices = shares.topk(self._routing.num_per_token, dim=-1)
        self.chosen_NK = indices
        if self._routing.normalized:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return torch.zeros_like(shares).scatter(-1, indices, chosen).to(x_NH.dtype)
