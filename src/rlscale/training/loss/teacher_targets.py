"""Targets of the divergence over tokens: the most likely tokens of a teacher, or its whole distribution.

    a server        most likely tokens, in the batch ─────────────────────────────────────┐
    a loaded one    its pass ─ most likely tokens, or the input of its output layer ──────┴─> take ─> loss

The whole distribution is never stored: the input of the output layer is, on the host, with a copy of that layer on the
device until the rollout is trained on. [tokens, vocabulary] exists one tile at a time, or, where the output layer of
the policy is not computed in tiles, for one micro-batch.

Shape legend: T tokens of the batch, N trainable tokens of this rank, R of a micro-batch, U entries of its output layer,
K most likely tokens, G hidden width of the teacher, V vocabulary of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlscale.algo.distillation import full_teacher_kl, teacher_kl
from rlscale.algo.linear_distillation import DenseTeacher, HiddenTeacher, TeacherRows, TopTeacher
from rlscale.config import AlgoConfig
from rlscale.config.groups.algo import OpdKl, has_teacher_loss
from rlscale.teacher_scores import TeacherScores
from rlscale.training.packing.microbatch import Microbatch
from rlscale.types import Int64

TOP_IDS, TOP_LOGPROBS, HIDDEN = "top_ids", "top_logprobs", "hidden"


@dataclass(kw_only=True, slots=True)
class TeacherTargets:
    """Columns of a teacher for the tokens of this rank, on the CPU. Written to by `release` alone."""

    columns: Mapping[str, Tensor]  # [N, ...]: the top ids and logprobs [N, K], or the hidden states [N, G]
    rows: Int64 | None = None  # [N] rows of the batch, ascending; None: the columns are of all T rows
    weight: Tensor | None = None  # [V, G] output layer for the hidden states, on the device
    is_whole: bool = False  # the most likely tokens are all tokens

    @classmethod
    def from_scores(cls, scores: TeacherScores, *, algo: AlgoConfig) -> TeacherTargets | None:
        """Those of servers, in the same memory; None: their answers have only the logprobs of the tokens."""
        if scores.top_ids is None or scores.top_logprobs is None:
            return None
        columns = {TOP_IDS: torch.from_numpy(scores.top_ids), TOP_LOGPROBS: torch.from_numpy(scores.top_logprobs)}
        return cls(columns=columns, is_whole=algo.opd_kl == OpdKl.full)

    def release(self) -> None:
        """Frees the columns and the output layer: the rollout is trained on, and engines may need the memory."""
        self.columns, self.weight = {}, None

    def take(self, micro: Microbatch, *, per_entry: bool = True) -> TeacherRows:
        """The teacher at the entries of a micro-batch's output layer [U], or at its trainable tokens [R].

        The values at the placeholder of an empty micro-batch are those of some token.
        """
        places = micro.batch_rows
        if self.rows is not None:
            places = np.minimum(np.searchsorted(self.rows, places), len(self.rows) - 1)
        index = torch.from_numpy(places)
        if per_entry:
            index = index[micro.entry_rows().cpu()]
        found = {name: column[index].to(micro.targets.device) for name, column in self.columns.items()}
        if HIDDEN in found:
            assert self.weight is not None, "hidden states come with an output layer"
            return HiddenTeacher(hidden_TG=found[HIDDEN], weight_VG=self.weight)
        ids, logprobs = found[TOP_IDS].long(), found[TOP_LOGPROBS]
        if not self.is_whole:
            return TopTeacher(ids_TK=ids, logprobs_TK=logprobs)
        return DenseTeacher(logprobs_TV=torch.empty_like(logprobs).scatter_(1, ids, logprobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    """The targets that a teacher in the trainer computes next to the logprobs of the tokens."""

    num_tokens: int  # V of the policy: the other tokens of a larger vocabulary have no place in the divergence
    num_top: int | None = None  # K; None: the input of the output layer

    @classmethod
    def from_algo(cls, algo: AlgoConfig, *, num_tokens: int) -> TargetOptions | None:
        """None: the loss has no divergence over tokens."""
        if not has_teacher_loss(algo):
            return None
        return cls(
            num_tokens=num_tokens, num_top=min(algo.opd_top_k, num_tokens) if algo.opd_kl == OpdKl.top_k else None
        )


@dataclass(kw_only=True, slots=True)
class TargetCollector:
    """Collects the columns of a teacher over its pass.

    Example:
        collector = TargetCollector()
        collector.add(micro, {HIDDEN: hidden_RG})   # for each micro-batch of the pass
        targets = collector.finish(weight=weight_VG)
    """

    rows: list[Int64] = field(default_factory=list)
    columns: list[Mapping[str, Tensor]] = field(default_factory=list)

    def add(self, micro: Microbatch, columns: Mapping[str, Tensor]) -> None:
        """Adds the columns of the trainable tokens of a micro-batch. [R, ...] each"""
        self.rows.append(micro.batch_rows)
        self.columns.append({name: column.detach().cpu() for name, column in columns.items()})

    def finish(self, *, weight: Tensor | None = None) -> TeacherTargets:
        """The columns of all micro-batches; `weight` is the output layer for hidden states. [V, G]"""
        # The placeholders of several empty micro-batches are one row.
        rows, first = np.unique(np.concatenate(self.rows), return_index=True)
        order = torch.from_numpy(first)
        columns = {name: torch.cat([each[name] for each in self.columns])[order] for name in self.columns[0]}
        self.columns.clear()
        return TeacherTargets(columns=columns, rows=rows, weight=weight)


def kl_of_logits(rows: TeacherRows, logits: Tensor, *, mask: Tensor, temperature: float, direction: str) -> Tensor:
    """Divergence from the teacher where the logits of the policy exist; 0 where masked. [R]

    Args:
        rows: of the teacher, at the R tokens.
        logits: of the policy, divided by the temperature. [R, V]
        mask: trainable tokens. [R]
        temperature: divides the logits of a teacher that is given by its hidden states.
        direction: see `teacher_kl`.
    """
    if isinstance(rows, TopTeacher):
        ids, logprobs = rows.ids_TK, rows.logprobs_TK
        return teacher_kl(logits, top_ids_TK=ids, top_logprobs_TK=logprobs, mask_T=mask, direction=direction)
    if isinstance(rows, DenseTeacher):
        logprobs = rows.logprobs_TV
    else:
        teacher_logits = (rows.hidden_TG @ rows.weight_VG.T).to(logits.dtype) / temperature
        logprobs = torch.log_softmax(teacher_logits, dim=-1)
    return full_teacher_kl(logits, teacher_logprobs_TV=logprobs, mask_T=mask, direction=direction)
