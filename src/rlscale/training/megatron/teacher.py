"""Pass of a teacher on Megatron-core over a rollout: logprobs, and what a divergence over tokens reads.

Tensor-parallel ranks divide the vocabulary: each has the policy's rows of the teacher's output layer, or all find the
most likely tokens of their parts together. Only the last stage has targets.

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, U entries of its output layer, K most likely
tokens, H hidden width, V rows of the output layer on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.linear_logprobs import top_logprobs_from_hidden
from rlscale.training.loss.teacher_targets import (
    HIDDEN,
    TOP_IDS,
    TOP_LOGPROBS,
    TargetCollector,
    TargetOptions,
    TeacherTargets,
)
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.step import score_column
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabRows:
    """Rows of an output layer on this rank: token ids from `first`, `size` of them with the padding."""

    first: int
    size: int

    @classmethod
    def from_model(cls, model: MegatronModel, dims: ParallelDims) -> VocabRows:
        """The rows of a model on this rank."""
        return cls(first=model.first_token, size=model.architecture.padded_vocab_size // dims.tensor_size)


def score_targets(
    model: MegatronModel,
    rollout: PackedRollout,
    *,
    dims: ParallelDims,
    head: OutputHead,
    options: TargetOptions,
    policy_rows: VocabRows,
) -> tuple[Tensor, TeacherTargets | None]:
    """Logprobs of a teacher as a column [T], on every stage, and its targets on the last one; a collective."""
    entries = _TargetEntries(
        head=head, options=options, dims=dims, own=VocabRows.from_model(model, dims), policy=policy_rows
    )
    column = score_column(
        model.chunks, rollout.scoring_micros, dims=dims, entries=entries, num_tokens=rollout.num_tokens
    )
    return column, entries.collector.finish(weight=entries.weight) if entries.collector.rows else None


@dataclass(kw_only=True, slots=True)
class _TargetEntries:
    """A `StageFunction` that collects targets next to the logprobs."""

    head: OutputHead
    options: TargetOptions
    dims: ParallelDims
    own: VocabRows
    policy: VocabRows
    collector: TargetCollector = field(default_factory=TargetCollector)
    weight: Tensor | None = None  # the policy's rows of the output layer [V, H]

    def __call__(self, micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
        weight = decoder.head_weight
        logprobs, _ = self.head.logprobs_and_entropy(hidden, weight, micro=micro, entropy_grad=False)
        chosen_UH = hidden.flatten(0, 1).index_select(0, micro.logit_rows)
        if self.options.num_top is None:
            columns = {HIDDEN: chosen_UH}
            self.weight = self._policy_weight(weight.detach()) if self.weight is None else self.weight
        else:
            columns = self._top(chosen_UH, weight, num_top=self.options.num_top)
        self.collector.add(micro, {name: micro.gather_shards(each) for name, each in columns.items()})
        return logprobs

    def _policy_weight(self, weight: Tensor) -> Tensor:
        """A copy of the rows of the tokens that the policy has on this rank; a collective where they differ."""
        first, last = self.policy.first, min(self.policy.first + self.policy.size, self.options.num_tokens)
        start = self.own.first
        if self.dims.tensor_size > 1 and self.policy != self.own:
            parts = [torch.empty_like(weight) for _ in range(self.dims.tensor_size)]
            dist.all_gather(parts, weight.contiguous(), group=self.dims.tensor_group)
            weight, start = torch.cat(parts), 0
        # A copy: the weights of a teacher in the policy's chunks are replaced after the pass.
        return weight[first - start : max(last, first) - start].clone()

    def _top(self, hidden_UH: Tensor, weight: Tensor, *, num_top: int) -> dict[str, Tensor]:
        """The most likely tokens of the whole vocabulary; a collective of the tensor-parallel ranks. [U, K] each"""
        rows = max(min(self.own.size, self.options.num_tokens - self.own.first), 0)
        ids_UK, x_UK, norms_U = top_logprobs_from_hidden(
            hidden_UH, weight[:rows], num_top=num_top, options=self.head.options(hidden_UH, num_rows=len(weight))
        )
        ids_UK = ids_UK + self.own.first
        if self.dims.tensor_size > 1:
            # A rank with fewer than K rows fills up with tokens that are never chosen.
            missing = num_top - x_UK.shape[1]
            x_UK = torch.nn.functional.pad(x_UK, (0, missing), value=-torch.inf)
            ids_UK = torch.nn.functional.pad(ids_UK, (0, missing))
            x_UK, ids_UK = (self._gathered(each, dim=1) for each in (x_UK, ids_UK))
            norms_U = torch.logsumexp(self._gathered(norms_U[:, None], dim=1), dim=1)
            x_UK, best_UK = x_UK.topk(num_top, dim=1)
            ids_UK = ids_UK.gather(1, best_UK)
        return {TOP_IDS: ids_UK.int(), TOP_LOGPROBS: x_UK - norms_U[:, None]}

    def _gathered(self, part: Tensor, *, dim: int) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.dims.tensor_size)]
        dist.all_gather(parts, part.contiguous(), group=self.dims.tensor_group)
        return torch.cat(parts, dim=dim)
