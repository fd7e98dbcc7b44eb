"""The matrices of all experts of a layer, and their products.

Shape legend: N tokens, H hidden width, I width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.decoder_config import ClampedGate
from rlscale.models.packed_linear import PackedLinear
from rlscale.models.quantized_linear import QuantizedLinear, QuantizedStack
from rlscale.models.quantized_weights import QuantizedWeight


class GatedExperts:
    """Experts with a SiLU gate: `down(silu(gate x) * up x)`.

    Args:
        gate_up: its rows are those of all gates, then all ups.
        down: returns [E, H, I].
        num: E
    """

    def __init__(self, gate_up: PackedLinear | QuantizedLinear, down: Callable[[], Tensor], *, num: int) -> None:
        self._gate_up, self._down, self._num = gate_up, down, num

    @classmethod
    def from_dense(cls, experts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[GatedExperts, list[Tensor]]:
        """Joins experts: gate, up and down projection of each, [I, H], [I, H] and [H, I].

        Returns:
            The experts, and the views that replace the given matrices, in the same order.
        """
        gates, ups, downs = zip(*experts, strict=True)
        fused, down_EHI = torch.cat([*gates, *ups]), torch.stack(downs)
        gate_up = fused.view(2, len(experts), *gates[0].shape)
        views = [view for i in range(len(experts)) for view in (gate_up[0, i], gate_up[1, i], down_EHI[i])]
        return cls(PackedLinear(fused, None), lambda: down_EHI, num=len(experts)), views

    @classmethod
    def from_quantized(
        cls, experts: Sequence[tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]]
    ) -> GatedExperts:
        """Joins quantised experts, whose tensors stay where they are."""
        gates, ups, downs = zip(*experts, strict=True)
        return cls(QuantizedLinear([*gates, *ups], None), QuantizedStack(downs), num=len(experts))

    def __call__(self, x_NH: Tensor, weights_NE: Tensor) -> Tensor:
        """See `Experts`."""
        # Columns of the fused product: gates of all experts, then ups of all experts.
        gate, up = self._gate_up(x_NH).view(x_NH.shape[0], 2, self._num, -1).unbind(1)
        inner_NEI = F.silu(gate) * up * weights_NE.unsqueeze(-1)
        return torch.bmm(inner_NEI.transpose(0, 1), self._down().transpose(1, 2)).sum(0)

    def prepare(self) -> None:
        """See `Experts`."""
        self._gate_up.prepare()

    def forget(self) -> None:
        """See `Experts`."""
        self._gate_up.forget()
        if isinstance(self._down, QuantizedStack):
            self._down.forget()


class ClampedExperts:
    """Experts of gpt-oss, in the stacked tensors of its checkpoints: transposed, with alternating gate and up columns.

    Args:
        matrices: return `gate_up_proj` [E, H, 2I] and `down_proj` [E, I, H].
        biases: of their outputs, `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, H].
        gate: its constants.
    """

    def __init__(
        self, matrices: Mapping[str, Callable[[], Tensor]], biases: Mapping[str, Tensor], gate: ClampedGate
    ) -> None:
        self._matrices, self._biases, self._gate = matrices, biases, gate

    def __call__(self, x_NH: Tensor, weights_NE: Tensor) -> Tensor:
        """See `Experts`."""
        limit = self._gate.limit
        gate_up = self._project("gate_up_proj", x_NH.expand(weights_NE.shape[1], -1, -1))
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(min=-limit, max=limit)
        inner_ENI = (up + 1) * gate * torch.sigmoid(gate * self._gate.alpha)
        out_ENH = self._project("down_proj", inner_ENI)
        return (out_ENH * weights_NE.T.unsqueeze(-1)).sum(0)

    def prepare(self) -> None:
        """Dequantises quantised matrices now instead of at the next call."""
        for matrices in self._matrices.values():
            matrices()

    def forget(self) -> None:
        """See `Experts`."""
        for matrices in self._matrices.values():
            if isinstance(matrices, QuantizedStack):
                matrices.forget()

    def _project(self, name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(self._biases[f"{name}_bias"].unsqueeze(1), x, self._matrices[name]())
