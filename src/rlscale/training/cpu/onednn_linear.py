"""Linear layers through oneDNN on a CPU.

torch computes float32 matrix products with MKL, which does not use AVX-512 on CPUs of other vendors than Intel. oneDNN
does: on an AMD EPYC (Zen 5, two cores, 3,072 tokens, 128 to 384 features) the products of forward pass and input
gradient ran at 400 to 490 GFLOP/s instead of 210, and the product of the weight gradient 1.2 to 1.7 times as fast (600
to 1,664 tokens). All are exact float32.

oneDNN compiles code for each shape, which takes 0.3 to 2 ms, and keeps that of a thousand shapes: 0.6 MB for each
number of tokens and product, 8 MB for those of a layer. Micro-batches hardly ever have the same number of tokens twice,
so that products use few numbers of rows (`few_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OneDnnLinear(nn.Linear):
    """Bias-free float32 `nn.Linear` on the CPU, made by `use_onednn`. Other inputs use the default kernel."""

    def forward(self, input: Tensor) -> Tensor:
        if not _fits(input):
            return super().forward(input)
        out: Tensor = _OneDnnProduct.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return out


def use_onednn(model: nn.Module) -> int:
    """Turns the plain bias-free linear layers of a model into OneDnnLinear, in place; returns their number."""
    if not torch._C._has_mkldnn:
        return 0
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.bias is None]
    for layer in layers:
        layer.__class__ = OneDnnLinear
    return len(layers)


MIN_ROWS = 8
"""Numbers of rows in a product are multiples of this."""

SIZES_PER_OCTAVE = 8
"""Numbers of rows between two powers of 2, so that 6 % of the rows are padding on average."""


def few_rows(number: int) -> int:
    """The next larger number of rows, of few: 8, 16, ... 128, 144, 160, ... 256, 288, ..."""
    step = _step(number)
    return -(-number // step) * step


def _step(number: int) -> int:
    """Distance of the numbers of rows around `number`."""
    return max(MIN_ROWS, (1 << max(0, number - 1).bit_length()) // (2 * SIZES_PER_OCTAVE))


def product(x: Tensor, w: Tensor) -> Tensor:
    """Product x @ w.T without a gradient, through oneDNN where it is faster."""
    return _product(x, w) if _fits(x) else F.linear(x, w)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x: the gradient of w in x @ w.T. [O, I] from [T, O] and [T, I]

    oneDNN needs a contiguous first operand, so one of the two is transposed in memory: the narrower one. With 1,536
    outputs, 256 inputs and 1,660 rows that took 0.84 of the time of the other order.
    """
    if not _fits(x):
        return F.linear(grad.t(), x.t())
    # The last rows are added by the default kernel: padding would copy both operands.
    number = len(x) // _step(len(x)) * _step(len(x))
    if not number:
        return F.linear(grad.t(), x.t())
    first, last = slice(0, number), slice(number, None)
    if grad.shape[1] > x.shape[1]:
        out = _multiply(x[first].t(), grad[first].t()).t().contiguous()
    else:
        out = _multiply(grad[first].t(), x[first].t())
    return out if number == len(x) else out.addmm_(grad[last].t(), x[last])


def _fits(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32 and x.device.type == "cpu" and torch._C._has_mkldnn
    )  # torch for ARM may be built without


class _OneDnnProduct(torch.autograd.Function):
    """x @ w.T, with any number of leading dimensions in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _product(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, w = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad
        grad_w = weight_gradient(grad.flatten(0, -2), x.flatten(0, -2)) if need_w else None
        return _product(grad, w.t()) if need_x else None, grad_w


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Product x @ w.T with one of few numbers of rows."""
    number = math.prod(x.shape[:-1])
    num_padding = few_rows(number) - number
    if not num_padding:
        return _multiply(x, w)
    # Rows of zeros at the end, which are cut from the result.
    out = _multiply(F.pad(x.reshape(number, x.shape[-1]), (0, 0, 0, num_padding)), w)
    return _as_plain(out[:number], (*x.shape[:-1], len(w)))


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    """Product x @ w.T by the operator that torch.compile uses for linear layers on a CPU."""
    out = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return _as_plain(out, out.shape)


def _as_plain(out: Tensor, shape: Sequence[int]) -> Tensor:
    """A view whose base nothing else holds, as a plain tensor: FSDP warns about views."""
    fresh: Tensor = torch.ops.aten._unsafe_view(out, shape)
    return fresh
