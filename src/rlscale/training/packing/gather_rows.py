"""Gathers of rows whose backward pass is a gather too.

A scattered sum is slow on a CPU, and in no fixed order on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Reindex(torch.autograd.Function):
    """rows[index], whose backward pass is a gather by `inverse`.

    A row that `index` does not name, or names only to fill padding, is left to the gradient that `inverse` picks. All
    uses are exact: real rows and slots map to each other one to one; padding has zero gradient. Copies of a shared
    prompt's rows that are not picked have none either.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        index, inverse = ctx.saved_tensors
        if len(inverse) <= len(index):  # padding: every row sits in exactly one slot
            return grad.index_select(0, inverse), None, None
        padded = grad.new_zeros(len(inverse), *grad.shape[1:])
        return padded.index_copy_(0, index, grad), None, None


def gather_rows(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`Reindex` of rows [N, ...]. [len(index), ...]"""
    result: Tensor = Reindex.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return result
