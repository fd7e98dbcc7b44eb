"""Mixture-of-experts MLP: a router selects a few experts for each token.

Shape legend: N tokens (of any number of rows), H hidden width, I width of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import Routing
from rlscale.models.packed_linear import PackedLinear
from rlscale.models.quantized_linear import QuantizedLinear, QuantizedStack
from rlscale.models.quantized_weights import QuantizedWeight


class ExpertMlp:
    """Computes every expert for every token; experts that are not selected get weight 0.

    Grouping the tokens by expert would be less work, but the last bits of a product depend on its number of rows: the
    result of a token would depend on the experts of its neighbours. Use SGLang for a model with many experts.

    `weights` maps the name of each projection, relative to the layer, to a view of the matrix that is multiplied. It is
    empty with quantised experts, whose tensors stay where they are.
    """

    def __init__(
        self,
        routing: Routing,
        router: Tensor,
        *,
        gate_up: PackedLinear | QuantizedLinear,
        down: Callable[[], Tensor],
        weights: Mapping[str, Tensor],
    ) -> None:
        """`router` is [E, H], `down` returns [E, H, I]; the rows of `gate_up` are those of all gates, then all ups."""
        self._routing, self._router = routing, router
        self.expert_ids_NK: Tensor | None = None  # experts of each token of the last call, in any order
        self._gate_up, self._down, self.weights = gate_up, down, weights

    @classmethod
    def from_weights(cls, loader: WeightLoader, prefix: str, routing: Routing) -> ExpertMlp:
        """Loads router and experts of a checkpoint. `prefix` is that of their names, e.g. `model.layers.0.mlp.`."""
        parts = [
            [f"{prefix}experts.{i}.{part}_proj.weight" for part in ("gate", "up", "down")]
            for i in range(routing.num_experts)
        ]
        router = loader.load(f"{prefix}gate.weight")
        if loader.is_quantized:
            quantized = [(loader.quantize(g), loader.quantize(u), loader.quantize(d)) for g, u, d in parts]
            return cls.from_quantized(routing, router, quantized)
        mlp = cls.from_dense(routing, router, [(loader.load(g), loader.load(u), loader.load(d)) for g, u, d in parts])
        loader.weights.update({f"{prefix}{name}": view for name, view in mlp.weights.items()})
        return mlp

    @classmethod
    def from_dense(
        cls, routing: Routing, router: Tensor, experts: Sequence[tuple[Tensor, Tensor, Tensor]]
    ) -> ExpertMlp:
        """An expert is its gate, up and down projection: [I, H], [I, H] and [H, I]."""
        gates, ups, downs = zip(*experts, strict=True)
        fused, down_EHI = torch.cat([*gates, *ups]), torch.stack(downs)
        gate_up = fused.view(2, len(experts), *gates[0].shape)
        weights = {
            f"experts.{i}.{part}_proj.weight": view
            for i in range(len(experts))
            for part, view in (("gate", gate_up[0, i]), ("up", gate_up[1, i]), ("down", down_EHI[i]))
        }
        return cls(routing, router, gate_up=PackedLinear(fused, None), down=lambda: down_EHI, weights=weights)

    @classmethod
    def from_quantized(
        cls,
        routing: Routing,
        router: Tensor,
        experts: Sequence[tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]],
    ) -> ExpertMlp:
        """Like `from_dense`."""
        gates, ups, downs = zip(*experts, strict=True)
        gate_up, down = QuantizedLinear([*gates, *ups], None), QuantizedStack(downs)
        return cls(routing, router, gate_up=gate_up, down=down, weights={})

    def __call__(self, x_NH: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """The outputs [N, H]. `adapters` are ignored: experts have none, see `models/adapter_targets.py`."""
        num = self._routing.num_experts
        # Columns of the fused product: gates of all experts, then ups of all experts.
        gate, up = self._gate_up(x_NH).view(x_NH.shape[0], 2, num, -1).unbind(1)
        inner_NEI = F.silu(gate) * up * self._weights_NE(x_NH).unsqueeze(-1)
        return torch.bmm(inner_NEI.transpose(0, 1), self._down().transpose(1, 2)).sum(0)

    def projections(self) -> Iterator[Projection]:
        """The linear layers that may have adapters: none."""
        yield from ()

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""
        self._gate_up.prepare()

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""
        self._gate_up.forget()
        if isinstance(self._down, QuantizedStack):
            self._down.forget()

    def _weights_NE(self, x_NH: Tensor) -> Tensor:
        """Weight of each expert for each token, 0 for experts that are not selected."""
        probs = F.linear(x_NH, self._router).softmax(dim=-1, dtype=torch.float32)
        top_NK, indices = probs.topk(self._routing.num_per_token, dim=-1)
        self.expert_ids_NK = indices
        if self._routing.normalized:
            top_NK = top_NK / top_NK.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, indices, top_NK).to(x_NH.dtype)
