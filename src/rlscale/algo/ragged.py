"""The layout of packed response tokens, and the sums over it.

Shape legend of `algo/`: T response tokens of all samples laid end to end (no padding), S samples, V vocabulary.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rlscale.types import TokenColumns

Sums: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""{metric: (sum, count)}: scalars that add up over micro-batches and ranks; the metric is sum / count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Which sample each token belongs to, and which tokens are trainable.

    Samples without a single token are allowed: they own no entry of `sample_ids_T`.

    Example:
        layout = TokenLayout(
            mask_T=torch.tensor([True, True, False]), sample_ids_T=torch.tensor([0, 2, 2]), num_samples=3
        )
        layout.sum_per_sample(torch.ones(3))  # tensor([1., 0., 1.])
    """

    mask_T: Tensor  # [T] bool
    sample_ids_T: Tensor  # [T] int64, values in [0, num_samples)
    num_samples: int

    def __post_init__(self) -> None:
        check_vectors(mask_T=self.mask_T, sample_ids_T=self.sample_ids_T)
        if self.mask_T.dtype != torch.bool:
            raise ValueError(f"mask_T must be of type bool, got {self.mask_T.dtype}")
        if self.sample_ids_T.dtype != torch.int64:
            raise ValueError(f"sample_ids_T must be of type int64, got {self.sample_ids_T.dtype}")

    @classmethod
    def from_lengths(cls, mask_T: Tensor, *, lengths_S: Tensor) -> "TokenLayout":
        """The layout of samples that lie one after another, sample i with `lengths_S[i]` tokens."""
        sample_ids_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=mask_T.device), lengths_S)
        return cls(mask_T=mask_T, sample_ids_T=sample_ids_T, num_samples=len(lengths_S))

    @classmethod
    def of(cls, tokens: TokenColumns) -> "TokenLayout":
        """The layout of the tokens that a user's function is given."""
        return cls(mask_T=tokens.mask, sample_ids_T=tokens.sample_ids, num_samples=tokens.num_samples)

    @property
    def num_trainable(self) -> Tensor:
        """Trainable tokens, a scalar."""
        return self.mask_T.sum()

    def counts_per_sample(self) -> Tensor:
        """Trainable tokens of each sample. [S] int64"""
        counts_S = torch.zeros(self.num_samples, dtype=torch.int64, device=self.mask_T.device)
        return counts_S.index_add(0, self.sample_ids_T, self.mask_T.long())

    def sum_per_sample(self, values_T: Tensor) -> Tensor:
        """Sum over the trainable tokens of each sample, 0 for a sample without any. [S]"""
        check_vectors(values_T=values_T, mask_T=self.mask_T)
        sums_S = torch.zeros(self.num_samples, dtype=values_T.dtype, device=values_T.device)
        return sums_S.index_add(0, self.sample_ids_T, zero_masked(values_T, mask_T=self.mask_T))

    def mean_per_sample(self, values_T: Tensor) -> Tensor:
        """Mean over the trainable tokens of each sample, 0 for a sample without any. [S]"""
        return self.sum_per_sample(values_T) / self.counts_per_sample().clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """Gives every token the number of its sample. [T]"""
        check_shape("values_S", values_S, (self.num_samples,))
        return values_S[self.sample_ids_T]

    def sum_and_count(self, values_T: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the trainable tokens and their number: one entry of `Sums`, cut from the graph."""
        total = zero_masked(values_T.detach(), mask_T=self.mask_T).sum()
        return total, self.num_trainable.to(total.dtype)


def zero_masked(values_T: Tensor, *, mask_T: Tensor) -> Tensor:
    """`values_T` with exactly 0 where the mask is off, so that neither value nor gradient can come from there.

    Applied to inputs, before any arithmetic: a NaN that is masked only afterwards still gives a NaN gradient.
    """
    return torch.where(mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or in float64 where they are so already."""
    return values if values.dtype == torch.float64 else values.float()


def check_vectors(**tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are vectors of one length; the keyword is the name in the message."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or tensor.shape != first.shape:
            raise ValueError(
                f"{name} must be a vector as long as {first_name}, "
                f"got shape {tuple(tensor.shape)} beside {tuple(first.shape)}"
            )


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` has exactly this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
