"""Logprobs and entropy from hidden states and the output layer, without the logits of all tokens at once.

Shape legend: T tokens, V vocabulary, H hidden width, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.algo.ragged import check_shape

Product = Callable[[Tensor, Tensor], Tensor]
"""x [C, H], weight [V, H] -> x @ weight.T [C, V]"""

BLOCK_CHUNKS = 8
"""Chunks whose gradients are multiplied at once: each product of the weight's gradient passes over all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What `head_logprobs` is to compute, and how."""

    chunk_tokens: int  # rows of logits that exist at a time
    temperature: float = 1.0  # that of sampling
    entropy_grad: bool = False  # the entropy is part of the loss; False leaves it without gradient
    product: Product = F.linear

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.chunk_tokens < 1:
            raise ValueError(
                f"temperature and chunk_tokens must be above 0, got {self.temperature} and {self.chunk_tokens}"
            )


def head_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, *, targets_T: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy` of the logits hidden @ weight.T, of which only a chunk of rows exists at a time.

    With x = logits / temperature: log p(y) = x_y - log sum exp x and H = -sum p log p. The backward pass computes the
    logits anew, chunk by chunk: d/dx log p(y) = onehot(y) - p, d/dx H = -p (log p + H). Memory beyond the results is
    three chunks in float32, eight in the weight's type, and in bfloat16 a float32 gradient of the weight; there is one
    product of this size more than in the plain way.

    Args:
        hidden_TH: input of the output layer, float32 or bfloat16. [T, H]
        weight_VH: the output layer, of the same type; it has no bias. [V, H]
        targets_T: token ids. [T] int64
        options: see there.

    Returns:
        Logprobs and entropies, float32. [T], [T]
    """
    check_shape("targets_T", targets_T, tuple(hidden_TH.shape[:1]))
    if hidden_TH.shape[1] != weight_VH.shape[1] or hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden_TH and weight_VH must agree in width and type, got {tuple(hidden_TH.shape)} {hidden_TH.dtype} and "
            f"{tuple(weight_VH.shape)} {weight_VH.dtype}"
        )
    logprobs_T, entropy_T = _Head.apply(hidden_TH, weight_VH, targets_T, options)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T if options.entropy_grad else entropy_T.detach()


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        ctx.options = options
        num_tokens = len(targets_T)
        logprobs_T, entropy_T, norms_T = (hidden_TH.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        for start in range(0, num_tokens, options.chunk_tokens):
            rows = slice(start, start + options.chunk_tokens)
            x_CV = _scaled(options.product(hidden_TH[rows], weight_VH), options.temperature)
            norms_T[rows] = torch.logsumexp(x_CV, dim=1)
            x_CV -= norms_T[rows, None]
            logprobs_T[rows] = x_CV.gather(1, targets_T[rows, None]).squeeze(1)
            entropy_T[rows] = -torch.linalg.vecdot(x_CV.exp(), x_CV)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, norms_T, entropy_T)
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, norms_T, entropy_T = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        options: HeadOptions = ctx.options
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TH) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        num_tokens, num_block = len(targets_T), BLOCK_CHUNKS * options.chunk_tokens
        d_BV = weight_VH.new_empty(min(num_block, num_tokens), weight_VH.shape[0])
        for first in range(0, num_tokens, num_block):
            block = slice(first, min(first + num_block, num_tokens))
            for start in range(first, block.stop, options.chunk_tokens):
                rows = slice(start, min(start + options.chunk_tokens, block.stop))
                log_p = _scaled(options.product(hidden_TH[rows], weight_VH), options.temperature)
                log_p -= norms_T[rows, None]
                d_CV = log_p.exp()
                wanted_C1 = norms_T.new_zeros(d_CV.shape[0], 1) if of_logprobs is None else of_logprobs[rows, None]
                if of_entropy is None:
                    d_CV *= -wanted_C1
                else:
                    log_p += entropy_T[rows, None]
                    d_CV *= log_p.mul_(of_entropy[rows, None]).add_(wanted_C1).neg_()
                d_CV.scatter_add_(1, targets_T[rows, None], wanted_C1)
                d_BV[start - first : rows.stop - first] = (
                    d_CV if options.temperature == 1.0 else d_CV.div_(options.temperature)
                )
            of_block = d_BV[: block.stop - first]
            if grad_hidden is not None:
                torch.mm(of_block, weight_VH, out=grad_hidden[block])
            if grad_weight is not None:
                _add_product(grad_weight, of_block.t(), hidden_TH[block])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        return grad_hidden, grad_weight, None, None


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """The logits in float32, which the caller may write to."""
    x_CV = logits_CV.float()
    return x_CV if temperature == 1.0 else x_CV.div_(temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b  # summed in float32: a weight's gradient has parts from every chunk
