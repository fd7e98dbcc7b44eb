"""Linear layers whose weights rarely change, with oneDNN's packed weight layout on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ROWS = 64  # oneDNN chooses the layout for this number of rows; it works for any


class PackedLinear:
    """`x @ weight.T + bias`, on a CPU with a copy of the weight in oneDNN's blocked layout.

    On two cores (Zen 5) the linear layers of a decode step of 50 million parameters took 0.9 (bfloat16) and 0.5
    (float32) of the time of `F.linear` with 128 rows, 0.6 and 0.3 with 16. The weight is packed again after it was
    written: every in-place operation on a tensor or on a view of it increments its version.
    """

    __slots__ = ("_can_pack", "_packed", "_version", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._can_pack = _can_pack(weight)
        self._packed: Tensor | None = None
        self._version = -1

    @property
    def input_width(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if not self._can_pack:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._copy(), self.bias, "none", [], "")
        return out

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """`out + x @ weight.T`, in one operation on a CPU: two more cost more than the product of a small weight."""
        if not self._can_pack:
            return torch.addmm(out, x, self.weight.T)
        added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, out, self._copy(), None, "add")
        return added

    def prepare(self) -> None:
        """Packs the weight now instead of at the next call."""
        if self._can_pack:
            self._copy()

    def _copy(self) -> Tensor:
        # Views of one storage share the version counter, so a write to a part of a fused weight is seen.
        version = self.weight._version
        if self._packed is None or self._version != version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)
            self._version = version
        return self._packed

    def forget(self) -> None:
        """Frees the copy; the next call packs the weight again."""
        self._packed = None


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:  # e.g. torch for ARM has none
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
