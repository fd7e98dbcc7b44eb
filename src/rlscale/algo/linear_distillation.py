"""Divergence from a teacher, from hidden states and output layers, without the full logits of either model in memory.

On-policy distillation with the whole distribution of the teacher: Agarwal et al. 2024, "On-Policy Distillation of
Language Models" (GKD), arXiv:2306.13649; the reverse divergence: Gu et al. 2024, MiniLLM, arXiv:2306.08543.

Shape legend: T tokens, V vocabulary (of this rank, if sharded), H hidden width of the student, G that of the teacher,
K most likely tokens of the teacher, C columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from rlscale.algo.distillation import REVERSE, check_direction, divergence, divergence_slopes, log_others
from rlscale.algo.linear_logprobs import (
    HeadOptions,
    Tile,
    TileTerm,
    VocabShard,
    find_places,
    head_terms,
    scaled_logits,
)
from rlscale.algo.ragged import check_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenTeacher:
    """The whole distribution of a teacher, from the input of its output layer; the temperature is the student's."""

    hidden_TG: Tensor  # [T, G]
    weight_VG: Tensor  # [V, G] its rows for the tokens of the student's rows

    def logits(self, columns: slice, options: HeadOptions) -> Tensor:
        """One tile of scaled logits, as a new tensor. [T, C]"""
        return scaled_logits(self.hidden_TG, self.weight_VG[columns], options)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTeacher:
    """The whole distribution of a teacher, given for the whole vocabulary; its logprobs are taken as they are."""

    logprobs_TV: Tensor  # [T, vocabulary of all ranks]

    def logits(self, columns: slice, options: HeadOptions) -> Tensor:
        """One tile of logprobs, as a new tensor. [T, C]"""
        first = 0 if options.shard is None else options.shard.first
        return self.logprobs_TV[:, first + columns.start : first + columns.stop].clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTeacher:
    """The most likely tokens of a teacher; all others are one outcome, see `teacher_kl`."""

    ids_TK: Tensor  # [T, K] distinct
    logprobs_TK: Tensor  # [T, K]
    has_others: bool = True  # False: the K tokens are the whole vocabulary


TeacherRows: TypeAlias = HiddenTeacher | DenseTeacher | TopTeacher


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherRequest:
    """A teacher at the places whose logprobs are computed, and the direction of the divergence from it."""

    rows: TeacherRows
    direction: str = REVERSE

    def on_vocabulary(self, size: int) -> TeacherRequest:
        """The same request for a student of `size` tokens: whether K tokens leave any others, and all K exist."""
        if not isinstance(self.rows, TopTeacher):
            return self
        return replace(self, rows=replace(self.rows, has_others=self.rows.ids_TK.shape[1] < size))


def logprobs_and_teacher_kl(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    *,
    targets_T: Tensor,
    request: TeacherRequest,
    options: HeadOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """`logprobs_from_hidden`, and the divergence of the same distributions from a teacher, in one pass over the tiles.

    With p of the student and q of the teacher, at each token: KL(p || q) = sum_v p_v (log p_v - log q_v) (reverse), or
    KL(q || p) (forward). With x, y the scaled logits of both relative to their running maxima, s_p = sum exp x,
    s_q = sum exp y and d = sum exp(x) (x - y), the first is d / s_p - log s_p + log s_q; a rise of the maxima by a and
    b replaces d by (d - (a - b) s_p) exp(-a). The second exchanges the models. The gradient needs a further product of
    the teacher for each tile: d/dx KL(p || q) = p (log p - log q - KL), d/dx KL(q || p) = p - q. With the K most
    likely tokens it is `teacher_kl`. Ranks that share a vocabulary add up d and the sums.

    TRL: `use_liger_kernel` of GKD. verl: `distillation_loss.loss_mode=forward_kl_topk`.

    Args:
        hidden_TH, weight_VH, targets_T, options: as for `logprobs_from_hidden`.
        request: the teacher's distribution at the same places, without gradient [T, ...]; the direction `reverse` is
            KL(student || teacher), `forward` is KL(teacher || student).

    Returns:
        Logprobs, entropies and divergences, float32 (float64 stays). [T], [T], [T]
    """
    teacher, direction = request.rows, request.direction
    check_direction(direction)
    num_tokens, dtype = len(hidden_TH), torch.promote_types(hidden_TH.dtype, torch.float32)
    term: TileTerm
    if isinstance(teacher, TopTeacher):
        check_shape("logprobs_TK", teacher.logprobs_TK, (num_tokens, teacher.ids_TK.shape[1]))
        term = _TopTerm(teacher, direction=direction, options=options, dtype=dtype)
    else:
        if isinstance(teacher, HiddenTeacher):
            check_shape("hidden_TG", teacher.hidden_TG, (num_tokens, teacher.weight_VG.shape[1]))
            check_shape("weight_VG", teacher.weight_VG, (len(weight_VH), teacher.hidden_TG.shape[1]))
        zeros_T = hidden_TH.new_zeros(num_tokens, dtype=dtype)
        term = _FullTerm(teacher, direction=direction, options=options, zeros_T=zeros_T)
    logprobs_T, entropy_T, kl_T = head_terms(hidden_TH, weight_VH, targets_T=targets_T, options=options, term=term)
    assert kl_T is not None, "there is a term"
    return logprobs_T, entropy_T, kl_T


class _FullTerm:
    """Divergence over the whole vocabulary; see TileTerm."""

    def __init__(
        self, teacher: HiddenTeacher | DenseTeacher, *, direction: str, options: HeadOptions, zeros_T: Tensor
    ) -> None:
        self._teacher, self._is_reverse, self._options = teacher, direction == REVERSE, options
        self._largest_T = torch.full_like(zeros_T, torch.finfo(zeros_T.dtype).min)
        self._total_T, self._gap_T = zeros_T, zeros_T.clone()
        self._norms_T, self._kl_T = zeros_T, zeros_T

    def add(self, tile: Tile) -> None:
        y_TC = self._teacher.logits(tile.columns, self._options).to(self._gap_T.dtype)
        before_T, self._largest_T = self._largest_T, torch.maximum(self._largest_T, y_TC.amax(dim=1))
        y_TC.sub_(self._largest_T[:, None])
        fall_T = before_T - self._largest_T
        q_TC = y_TC.exp()
        gap_T = self._rescaled_gap(tile.fall_T, fall_T, total_T=tile.total_T)
        self._total_T = self._total_T * fall_T.exp() + q_TC.sum(dim=1)
        d_TC = tile.shifted_TC - y_TC if self._is_reverse else y_TC.sub_(tile.shifted_TC)
        self._gap_T = gap_T + torch.linalg.vecdot(tile.p_TC if self._is_reverse else q_TC, d_TC)

    def _rescaled_gap(self, student_T: Tensor, teacher_T: Tensor, *, total_T: Tensor) -> Tensor:
        """The gap relative to the new maxima, which are higher by minus the given falls."""
        if self._is_reverse:
            return (self._gap_T + (student_T - teacher_T) * total_T) * student_T.exp()
        return (self._gap_T + (teacher_T - student_T) * self._total_T) * teacher_T.exp()

    def reduce(self, fall_T: Tensor, *, total_T: Tensor, shard: VocabShard) -> None:
        largest_T = self._largest_T.clone()
        shard.reduce_max(largest_T)
        own_T, self._largest_T = self._largest_T - largest_T, largest_T
        gap_T = self._rescaled_gap(fall_T, own_T, total_T=total_T)
        parts_2T = torch.stack((self._total_T * own_T.exp(), gap_T))
        shard.reduce_sum(parts_2T)
        self._total_T, self._gap_T = parts_2T

    def finish(self, *, largest_T: Tensor, total_T: Tensor) -> Tensor:
        student_T, teacher_T = total_T.log(), self._total_T.log()
        self._norms_T = self._largest_T + teacher_T
        if self._is_reverse:
            self._kl_T = self._gap_T / total_T - student_T + teacher_T
        else:
            self._kl_T = self._gap_T / self._total_T - teacher_T + student_T
        return self._kl_T.clone()

    def gradient(self, log_p_TC: Tensor, columns: slice) -> Tensor:
        log_q_TC = self._teacher.logits(columns, self._options).to(log_p_TC.dtype).sub_(self._norms_T[:, None])
        if not self._is_reverse:
            return log_p_TC.exp().sub_(log_q_TC.exp_())
        return log_q_TC.neg_().add_(log_p_TC).sub_(self._kl_T[:, None]).mul_(log_p_TC.exp())


class _TopTerm:
    """Divergence over the most likely tokens of the teacher and one outcome for all others; see TileTerm."""

    def __init__(self, teacher: TopTeacher, *, direction: str, options: HeadOptions, dtype: torch.dtype) -> None:
        self._ids_TK, self._direction, self._options = teacher.ids_TK.long(), direction, options
        log_q_TK = teacher.logprobs_TK.to(dtype)
        self._x_TK = torch.zeros_like(log_q_TK)
        self._others_T = log_q_TK.new_zeros(len(log_q_TK)) if teacher.has_others else None
        # The outcome for all other tokens is the last column.
        self._log_q_TK = torch.cat([log_q_TK, log_others(log_q_TK)[:, None]], dim=1) if teacher.has_others else log_q_TK
        self._slopes_TK = self._log_q_TK
        self._ratio_T1 = self._log_q_TK[:, -1:]

    def add(self, tile: Tile) -> None:
        places_TK, is_here_TK = find_places(self._ids_TK, tile.columns, self._options.shard)
        x_TK = tile.shifted_TC.gather(1, places_TK) + tile.largest_T[:, None]
        self._x_TK = torch.where(is_here_TK, x_TK, self._x_TK)
        if self._others_T is not None:
            _clear(tile.p_TC, places_TK, is_here_TK)
            self._others_T = self._others_T * tile.fall_T.exp() + tile.p_TC.sum(dim=1)

    def reduce(self, fall_T: Tensor, *, total_T: Tensor, shard: VocabShard) -> None:
        shard.reduce_sum(self._x_TK)
        if self._others_T is not None:
            self._others_T = self._others_T * fall_T.exp()
            shard.reduce_sum(self._others_T)

    def finish(self, *, largest_T: Tensor, total_T: Tensor) -> Tensor:
        log_p_TK = self._x_TK - (largest_T + total_T.log())[:, None]
        if self._others_T is not None:
            # The smallest positive number for a student that is sure: its logarithm is finite.
            others_T = self._others_T.clamp(min=torch.finfo(self._others_T.dtype).tiny)
            log_p_TK = torch.cat([log_p_TK, (others_T / total_T).log()[:, None]], dim=1)
        slopes_TK, ratios_TK = divergence_slopes(log_p_TK, self._log_q_TK, direction=self._direction)
        self._slopes_TK, self._ratio_T1 = slopes_TK, ratios_TK[:, -1:]
        return divergence(log_p_TK, self._log_q_TK, direction=self._direction)

    def gradient(self, log_p_TC: Tensor, columns: slice) -> Tensor:
        places_TK, is_here_TK = find_places(self._ids_TK, columns, self._options.shard)
        p_TC = log_p_TC.exp()
        # d/dx_v log p_k is [v = k] - p_v; of the others' logprob, p_v / p_others - p_v at each of them.
        grad_TC = p_TC * -self._slopes_TK.sum(dim=1, keepdim=True)
        if self._others_T is not None:
            _clear(p_TC, places_TK, is_here_TK)
            grad_TC.addcmul_(p_TC, self._ratio_T1)
        slopes_TK = self._slopes_TK[:, : self._ids_TK.shape[1]]
        return grad_TC.scatter_add_(1, places_TK, slopes_TK * is_here_TK)


def _clear(p_TC: Tensor, places_TK: Tensor, is_here_TK: Tensor) -> None:
    """Sets the columns of the tokens that are in a tile to 0, in place; the places of the others are arbitrary."""
    # With a minimum, the others change nothing where their places collide.
    bounds_TK = torch.where(is_here_TK, 0.0, torch.inf).to(p_TC.dtype)
    p_TC.scatter_reduce_(1, places_TK, bounds_TK, reduce="amin")
