"""Layout of packed response tokens, and sums per sample over it.

Shape legend of `algo/`: T response tokens of all samples, packed end to end without padding; S samples; V vocabulary;
B rows and L columns of a padded batch.
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
    """Maps each packed token to its sample, and marks the trainable tokens.

    verl: `response_mask`, TRL: `completion_mask`, slime: `loss_masks`. Samples without a single token are allowed: they
    have no entry in `sample_ids_T`.

    Example:
        layout = TokenLayout(
            mask_T=torch.tensor([True, True, False]), sample_ids_T=torch.tensor([0, 2, 2]), num_samples=3
        )
        layout.sum_per_sample(torch.ones(3))  # tensor([1., 0., 1.])

        layout = TokenLayout.from_padded(response_mask)  # [B, L]
        losses_T, sums = clipped_policy_loss(layout.pack(log_prob), ..., layout=layout, clip=ClipRange(low=0.2))
        layout.unpack(losses_T)  # [B, L]
    """

    mask_T: Tensor  # [T] bool
    sample_ids_T: Tensor  # [T] int64, values in [0, num_samples)
    num_samples: int
    packed_BL: Tensor | None = None  # [B, L] bool: positions of the T tokens in a padded batch; None: not padded

    def __post_init__(self) -> None:
        check_vectors(mask_T=self.mask_T, sample_ids_T=self.sample_ids_T)
        if self.mask_T.dtype != torch.bool:
            raise ValueError(f"mask_T must be of type bool, got {self.mask_T.dtype}")
        if self.sample_ids_T.dtype != torch.int64:
            raise ValueError(f"sample_ids_T must be of type int64, got {self.sample_ids_T.dtype}")

    @classmethod
    def from_lengths(cls, mask_T: Tensor, *, lengths_S: Tensor) -> "TokenLayout":
        """Builds the layout of samples packed in order, sample i with `lengths_S[i]` tokens."""
        sample_ids_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=mask_T.device), lengths_S)
        return cls(mask_T=mask_T, sample_ids_T=sample_ids_T, num_samples=len(lengths_S))

    @classmethod
    def from_columns(cls, tokens: TokenColumns) -> "TokenLayout":
        """Builds the layout of the tokens that a user's function receives."""
        return cls(mask_T=tokens.mask, sample_ids_T=tokens.sample_ids, num_samples=tokens.num_samples)

    @classmethod
    def from_padded(cls, mask_BL: Tensor, *, valid_BL: Tensor | None = None) -> "TokenLayout":
        """Builds the layout of a padded batch in which row b is sample b. See `pack` and `unpack`.

        Args:
            mask_BL: nonzero at trainable tokens: verl's `response_mask`, TRL's `completion_mask`, slime's `loss_masks`
                as rows. Padding may be on either side. [B, L]
            valid_BL: nonzero at every token that `pack` keeps, trainable or not; None: the trainable ones. Functions of
                `algo` give the same result either way. [B, L]
        """
        if mask_BL.ndim != 2:
            raise ValueError(f"mask_BL must have two dimensions, got shape {tuple(mask_BL.shape)}")
        mask_BL = mask_BL.bool()
        packed_BL = mask_BL
        if valid_BL is not None:
            check_shape("valid_BL", valid_BL, tuple(mask_BL.shape))
            packed_BL = valid_BL.bool()
            if (mask_BL & ~packed_BL).any():
                raise ValueError("valid_BL must be nonzero at every trainable token, got 0 at one of them")
        # Boolean indexing reads row by row, so the tokens of a sample stay together and in order.
        rows_B1 = torch.arange(len(mask_BL), device=mask_BL.device)[:, None]
        return cls(
            mask_T=mask_BL[packed_BL],
            sample_ids_T=rows_B1.expand(mask_BL.shape)[packed_BL],
            num_samples=len(mask_BL),
            packed_BL=packed_BL,
        )

    def pack(self, values_BL: Tensor) -> Tensor:
        """Drops the padding of a column of the padded batch; trailing dimensions stay. [B, L, ...] -> [T, ...]"""
        packed_BL = self._padded_positions()
        check_shape("values_BL", values_BL, (*packed_BL.shape, *values_BL.shape[2:]))
        return values_BL[packed_BL]

    def unpack(self, values_T: Tensor) -> Tensor:
        """Inverse of `pack`: the padded column, 0 at positions that are not packed. [T, ...] -> [B, L, ...]"""
        packed_BL = self._padded_positions()
        check_shape("values_T", values_T, (len(self.mask_T), *values_T.shape[1:]))
        values_BL = values_T.new_zeros((*packed_BL.shape, *values_T.shape[1:]))
        values_BL[packed_BL] = values_T
        return values_BL

    def _padded_positions(self) -> Tensor:
        if self.packed_BL is None:
            raise ValueError("layout must come from TokenLayout.from_padded, got one without padded positions")
        return self.packed_BL

    @property
    def num_trainable(self) -> Tensor:
        """Number of trainable tokens, a scalar."""
        return self.mask_T.sum()

    def counts_per_sample(self) -> Tensor:
        """Number of trainable tokens of each sample. [S] int64"""
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
        """Broadcasts a value per sample to the tokens of the sample. [T]"""
        check_shape("values_S", values_S, (self.num_samples,))
        return values_S[self.sample_ids_T]

    def sum_and_count(self, values_T: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the trainable tokens and their number, without gradient: one entry of `Sums`."""
        total = zero_masked(values_T.detach(), mask_T=self.mask_T).sum()
        return total, self.num_trainable.to(total.dtype)


def zero_masked(values_T: Tensor, *, mask_T: Tensor) -> Tensor:
    """Returns `values_T` with exactly 0 where the mask is off, so that neither value nor gradient comes from there.

    Apply it to inputs, before any arithmetic: a NaN that is masked only afterwards still gives a NaN gradient.
    """
    return torch.where(mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))


def at_least_float32(values: Tensor) -> Tensor:
    """Converts to float32; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def check_vectors(**tensors: Tensor) -> None:
    """Raises ValueError unless all tensors are vectors of one length; the keyword is the name in the message."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or tensor.shape != first.shape:
            raise ValueError(
                f"{name} must be a vector as long as {first_name}, "
                f"got shape {tuple(tensor.shape)} instead of {tuple(first.shape)}"
            )


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` has exactly this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
