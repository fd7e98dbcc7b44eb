"""Gathers of rows whose backward pass is a gather too.

The default backward pass is a scattered sum: slow on a CPU, and without a fixed order on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Reindex(torch.autograd.Function):
    """rows[index] with a gather by `inverse` as its backward pass.

    Exact for all uses: real rows and slots map to each other one to one, and slots of padding have no gradient. So do
    the copies of a shared prompt's rows that are not picked.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        index, inverse = ctx.saved_tensors
        if len(inverse) <= len(index):  # padding was added: every row is in exactly one slot
            return grad.index_select(0, inverse), None, None
        # Rows were dropped: the dropped ones get a gradient of 0.
        padded = grad.new_zeros(len(inverse), *grad.shape[1:])
        return padded.index_copy_(0, index, grad), None, None


def gather_rows(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`Reindex` of rows [N, ...]. [len(index), ...]"""
    result: Tensor = Reindex.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return result
