"""Logprobs and entropy from hidden states and the output layer, without the full logits in memory.

Shape legend: T tokens, V vocabulary (of this rank, if sharded), H hidden width, C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.algo.ragged import check_shape

Product = Callable[[Tensor, Tensor], Tensor]
"""x [M, K], w [N, K] -> x @ w.T [M, N], as a new tensor that the caller may write to"""

_EVEN_COLUMNS = 64
"""Tiles of at least this width are a multiple of it: matrix products are fastest for even shapes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """The rows of a vocabulary-parallel output layer on this rank. Both reductions are in place, over these ranks."""

    first: int  # token id of the first row
    reduce_max: Callable[[Tensor], None]
    reduce_sum: Callable[[Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """Options of `logprobs_from_hidden`."""

    chunk_tokens: int  # the tile in memory is as large as the full logits of this many tokens
    temperature: float = 1.0  # that of sampling
    entropy_grad: bool = False  # the entropy is part of the loss; False: no gradient
    product: Product = F.linear
    shard: VocabShard | None = None  # None: the weight is the whole vocabulary

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.chunk_tokens < 1:
            raise ValueError(
                f"temperature and chunk_tokens must be above 0, got {self.temperature} and {self.chunk_tokens}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One tile of the scaled logits x in the forward pass, with its rows relative to their largest logit m so far."""

    columns: slice  # of this rank's rows of the output layer
    shifted_TC: Tensor  # x - m
    p_TC: Tensor  # exp(x - m); may be written to
    largest_T: Tensor  # m, with this tile
    fall_T: Tensor  # m before this tile, minus m
    total_T: Tensor  # sum exp(x - m) of the tiles before this one, relative to m before it


class TileTerm(Protocol):
    """A further value per token that is summed over the tiles of the logits: the divergence from a teacher."""

    def add(self, tile: Tile) -> None:
        """Adds a tile in the forward pass."""
        ...

    def reduce(self, fall_T: Tensor, *, total_T: Tensor, shard: VocabShard) -> None:
        """Adds up the shards of the vocabulary; a collective.

        `fall_T` is m of this rank minus that of all ranks, `total_T` sum exp(x - m) of this rank, relative to its m.
        """
        ...

    def finish(self, *, largest_T: Tensor, total_T: Tensor) -> Tensor:
        """The value of each token, from the m and the sum exp(x - m) of all tiles. [T]"""
        ...

    def gradient(self, log_p_TC: Tensor, columns: slice) -> Tensor:
        """Gradient of the value with respect to x, of one tile, from the logprobs of the tile. A new tensor. [T, C]"""
        ...


def logprobs_from_hidden(
    hidden_TH: Tensor, weight_VH: Tensor, *, targets_T: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy` of the logits hidden @ weight.T, with only one tile of columns in memory at a time.

    With x = logits / temperature: log p(y) = x_y - log sum exp x and H = -sum p log p. The sums run over tiles,
    relative to the running maximum (M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
    arXiv:1805.02867): with s = sum exp(x - m) and e = sum exp(x - m) (x - m), a rise of m to n replaces s
    by s exp(m - n) and e by (e + (m - n) s) exp(m - n); at the end H = log s - e / s. The backward pass recomputes each
    tile: d/dx log p(y) = onehot(y) - p, d/dx H = -p (log p + H). So a row of the weight gets its gradient from one
    product over all tokens, in the weight's own type, at the price of one more product of [T, V]. verl:
    `FusedLinearForPPO`. TRL: `use_liger_kernel`. slime: `--log-probs-chunk-size`, which splits by tokens.

    Ranks that share a vocabulary (`options.shard`) pass the same hidden states and targets, and get the same results
    and the same gradient of the hidden states; both passes are collectives.

    Args:
        hidden_TH: input of the output layer: float32, float64 or bfloat16. [T, H]
        weight_VH: the output layer, of the same type; it has no bias. [V, H]
        targets_T: token ids. [T] int64
        options: chunk size, temperature, gradient of the entropy, and vocabulary shard.

    Returns:
        Logprobs and entropies, float32 (float64 stays). [T], [T]
    """
    logprobs_T, entropy_T, _ = head_terms(hidden_TH, weight_VH, targets_T=targets_T, options=options)
    return logprobs_T, entropy_T


def head_terms(
    hidden_TH: Tensor, weight_VH: Tensor, *, targets_T: Tensor, options: HeadOptions, term: TileTerm | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`logprobs_from_hidden`, and the values of `term`, which holds what its backward pass needs. [T], [T], [T]"""
    check_shape("targets_T", targets_T, tuple(hidden_TH.shape[:1]))
    if hidden_TH.shape[1] != weight_VH.shape[1] or hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden_TH and weight_VH must agree in width and type, got {tuple(hidden_TH.shape)} {hidden_TH.dtype} and "
            f"{tuple(weight_VH.shape)} {weight_VH.dtype}"
        )
    _check_targets(targets_T, num_columns=len(weight_VH), options=options)
    logprobs_T, entropy_T, term_T = _FromHidden.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, targets_T, options, term
    )
    return logprobs_T, entropy_T if options.entropy_grad else entropy_T.detach(), term_T


def _check_targets(targets_T: Tensor, *, num_columns: int, options: HeadOptions) -> None:
    """Raises ValueError for ids outside of the vocabulary; on a CPU only, since a GPU would have to synchronise."""
    # A rank of a sharded vocabulary does not know the whole range.
    if options.shard is not None or targets_T.is_cuda or not len(targets_T):
        return
    low, high = (int(each) for each in targets_T.aminmax())
    if low < 0 or high >= num_columns:
        raise ValueError(f"targets_T must be token ids from 0 to {num_columns - 1}, got {low} to {high}")


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, options: HeadOptions, term: TileTerm | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        sums = _sums_over_tiles(hidden_TH, weight_VH, targets_T=targets_T, options=options, term=term)
        if options.shard is not None:
            sums = _all_reduced(sums, options.shard, term=term)
        logs_T = sums.total_T.log()
        entropy_T = logs_T - sums.weighted_T / sums.total_T
        term_T = None if term is None else term.finish(largest_T=sums.largest_T, total_T=sums.total_T)
        ctx.options, ctx.term = options, term
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, sums.largest_T + logs_T, entropy_T)
        ctx.set_materialize_grads(False)
        return sums.target_T - sums.largest_T - logs_T, entropy_T, term_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, norms_T, entropy_T = ctx.saved_tensors
        logprob_grad, entropy_grad, term_grad = grads
        options: HeadOptions = ctx.options
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_TH, dtype=norms_T.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight_VH) if need_weight else None
        # x is logits / temperature, so every gradient of the logits has the factor 1 / temperature.
        scaled_T1 = (norms_T.new_zeros(len(norms_T)) if logprob_grad is None else logprob_grad)[:, None]
        scaled_T1 = scaled_T1 / options.temperature
        for columns in _tiles(hidden_TH, weight_VH, options):
            d_TC = scaled_logits(hidden_TH, weight_VH[columns], options).sub_(norms_T[:, None])
            # Before the logprobs are overwritten.
            term_TC = None if term_grad is None else ctx.term.gradient(d_TC, columns)
            if entropy_grad is None:
                d_TC.exp_().mul_(-scaled_T1)
            else:
                # -p (g_H (log p + H) + g), in place: a tile is the only large tensor.
                p_TC = d_TC.exp()
                d_TC.add_(entropy_T[:, None]).mul_(entropy_grad[:, None] / options.temperature).add_(scaled_T1).neg_()
                d_TC.mul_(p_TC)
                del p_TC
            places_T, is_here_T = find_places(targets_T, columns, options.shard)
            # The onehot(y) term, only for targets in this tile.
            d_TC.scatter_add_(1, places_T[:, None], scaled_T1 * is_here_T[:, None])
            if term_TC is not None and term_grad is not None:
                d_TC.add_(term_TC.mul_(term_grad[:, None] / options.temperature))
                del term_TC
            d_TC = d_TC.to(weight_VH.dtype)
            if grad_hidden is not None:
                grad_hidden += options.product(d_TC, weight_VH[columns].t())
            if grad_weight is not None:
                grad_weight[columns] = options.product(d_TC.t(), hidden_TH.t())
        if grad_hidden is not None:
            if options.shard is not None:
                options.shard.reduce_sum(grad_hidden)
            grad_hidden = grad_hidden.to(hidden_TH.dtype)
        return grad_hidden, grad_weight, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Running sums of the softmax, per row x of scaled logits. [T]"""

    largest_T: Tensor  # m = max x
    total_T: Tensor  # sum exp(x - m)
    weighted_T: Tensor  # sum exp(x - m) (x - m)
    target_T: Tensor  # x_y; 0 where y is not among these columns


def _sums_over_tiles(
    hidden_TH: Tensor, weight_VH: Tensor, *, targets_T: Tensor, options: HeadOptions, term: TileTerm | None
) -> _Sums:
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    total_T, weighted_T, target_T = (hidden_TH.new_zeros(len(targets_T), dtype=dtype) for _ in range(3))
    largest_T = torch.full_like(total_T, torch.finfo(dtype).min)
    for columns in _tiles(hidden_TH, weight_VH, options):
        x_TC = scaled_logits(hidden_TH, weight_VH[columns], options)
        places_T, is_here_T = find_places(targets_T, columns, options.shard)
        target_T = torch.where(is_here_T, x_TC.gather(1, places_T[:, None]).squeeze(1), target_T)
        # Rescales the sums so far to the new maximum before this tile is added.
        before_T, largest_T = largest_T, torch.maximum(largest_T, x_TC.amax(dim=1))
        x_TC.sub_(largest_T[:, None])
        p_TC = x_TC.exp()
        fall_T = before_T - largest_T
        weighted_T = (weighted_T + fall_T * total_T) * fall_T.exp() + torch.linalg.vecdot(p_TC, x_TC)
        earlier_T, total_T = total_T, total_T * fall_T.exp() + p_TC.sum(dim=1)
        if term is not None:
            term.add(
                Tile(
                    columns=columns,
                    shifted_TC=x_TC,
                    p_TC=p_TC,
                    largest_T=largest_T,
                    fall_T=fall_T,
                    total_T=earlier_T,
                )
            )
        del x_TC, p_TC  # before the next tile is allocated
    return _Sums(largest_T=largest_T, total_T=total_T, weighted_T=weighted_T, target_T=target_T)


def _all_reduced(sums: _Sums, shard: VocabShard, *, term: TileTerm | None) -> _Sums:
    """The sums over all shards of the vocabulary; a collective."""
    largest_T = sums.largest_T.clone()
    shard.reduce_max(largest_T)
    # The same rescaling as between tiles, to the maximum over all ranks.
    fall_T = sums.largest_T - largest_T
    if term is not None:
        term.reduce(fall_T, total_T=sums.total_T, shard=shard)
    weighted_T = sums.weighted_T + fall_T * sums.total_T
    parts_3T = torch.stack((sums.total_T * fall_T.exp(), weighted_T * fall_T.exp(), sums.target_T))
    shard.reduce_sum(parts_3T)
    total_T, weighted_T, target_T = parts_3T
    return _Sums(largest_T=largest_T, total_T=total_T, weighted_T=weighted_T, target_T=target_T)


def _tiles(hidden_TH: Tensor, weight_VH: Tensor, options: HeadOptions) -> Iterator[slice]:
    """Ranges of columns of the logits, one per tile."""
    num_tokens, num_columns = max(len(hidden_TH), 1), len(weight_VH)
    width = max(1, min(options.chunk_tokens * num_columns // num_tokens, num_columns))
    if _EVEN_COLUMNS <= width < num_columns:
        width -= width % _EVEN_COLUMNS
    for start in range(0, num_columns, width):
        yield slice(start, min(start + width, num_columns))


def scaled_logits(hidden_TH: Tensor, weight_CH: Tensor, options: HeadOptions) -> Tensor:
    """Scaled logits in float32 (float64 stays), which the caller may write to. [T, C]"""
    logits_TC = options.product(hidden_TH, weight_CH)
    x_TC = logits_TC.to(torch.promote_types(logits_TC.dtype, torch.float32))
    return x_TC if options.temperature == 1.0 else x_TC.div_(options.temperature)


def top_logprobs_from_hidden(
    hidden_TH: Tensor, weight_VH: Tensor, *, num_top: int, options: HeadOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely tokens, with one tile of logits in memory at a time; no gradient. verl: `distillation_loss.topk`.

    Args:
        hidden_TH, weight_VH, options: as for `logprobs_from_hidden`, without a vocabulary shard: the logits of a shard
            alone.
        num_top: K, at most V.

    Returns:
        Rows of the weight, most likely first [T, K] int64; their scaled logits [T, K]; and log sum exp x of all [T].
    """
    ids_TK = hidden_TH.new_zeros((len(hidden_TH), 0), dtype=torch.int64)
    x_TK = hidden_TH.new_zeros((len(hidden_TH), 0), dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
    norms_T = torch.full_like(x_TK[:, :1].sum(dim=1), -torch.inf)
    for columns in _tiles(hidden_TH, weight_VH, options):
        x_TC = scaled_logits(hidden_TH, weight_VH[columns], options)
        norms_T = torch.logaddexp(norms_T, torch.logsumexp(x_TC, dim=1))
        tile_TK, places_TK = x_TC.topk(min(num_top, x_TC.shape[1]), dim=1)
        # The best of the tiles so far and of this one.
        both_TK = torch.cat([x_TK, tile_TK], dim=1)
        x_TK, best_TK = both_TK.topk(min(num_top, both_TK.shape[1]), dim=1)
        ids_TK = torch.cat([ids_TK, places_TK + columns.start], dim=1).gather(1, best_TK)
    return ids_TK, x_TK, norms_T


def find_places(targets_T: Tensor, columns: slice, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Column of each target in a tile (arbitrary if outside), and a mask of the targets inside of the tile.

    Both have the shape of `targets_T`, which may have further dimensions.
    """
    first = columns.start + (0 if shard is None else shard.first)
    places_T = targets_T - first
    last = columns.stop - columns.start - 1
    is_here_T = (places_T >= 0) & (places_T <= last)
    return places_T.clamp(0, last), is_here_T
