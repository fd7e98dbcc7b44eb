"""Pass of a teacher on FSDP2 over a rollout: logprobs, and what a divergence over tokens reads.

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, U entries of its output layer, K most likely
tokens, G hidden width, V vocabulary of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlscale.algo.linear_logprobs import HeadOptions, top_logprobs_from_hidden
from rlscale.algo.logprobs import logprobs_from_logits
from rlscale.algo.ragged import at_least_float32
from rlscale.training.cpu.onednn_linear import product
from rlscale.training.fsdp.model import reshard
from rlscale.training.fsdp.step import compute_logits, compute_policy_terms, computes_in_tiles
from rlscale.training.loss.teacher_targets import (
    HIDDEN,
    TOP_IDS,
    TOP_LOGPROBS,
    TargetCollector,
    TargetOptions,
    TeacherTargets,
)
from rlscale.training.modules.logprob_head import output_layer, tile_tokens
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, write_microbatch


@torch.no_grad()
def score_targets(
    model: PreTrainedModel, rollout: PackedRollout, *, temperature: float, options: TargetOptions
) -> tuple[Tensor, TeacherTargets]:
    """Logprobs by a teacher as a column of the batch [T], and its targets; see `score_logprobs`."""
    column, collector = torch.zeros(rollout.num_tokens), TargetCollector()
    tap, head = _HeadTap(model, options, temperature=temperature), output_layer(model)
    assert head is not None, "a language model has an output layer"
    hook = head.register_forward_hook(tap)
    try:
        for micro in rollout.scoring_micros:
            write_microbatch(column, micro, tap.logprobs(micro).cpu())
            collector.add(micro, {name: micro.gather_shards(each) for name, each in tap.columns.items()})
    finally:
        hook.remove()
    reshard(model)
    return column, collector.finish(weight=tap.weight)


class _HeadTap:
    """Forward hook of the output layer that keeps what the divergence reads: only there its weight is gathered."""

    def __init__(self, model: PreTrainedModel, options: TargetOptions, *, temperature: float) -> None:
        self._model, self._options, self._temperature = model, options, temperature
        self._has_tiles = computes_in_tiles(model)
        self.columns: Mapping[str, Tensor] = {}  # of the last micro-batch [U, ...]
        self.weight: Tensor | None = None  # [V, G]

    def logprobs(self, micro: Microbatch) -> Tensor:
        """Logprobs of a micro-batch, which sets `columns`. [R]"""
        if self._has_tiles:
            terms = compute_policy_terms(self._model, micro, temperature=self._temperature, entropy_grad=False)
            return terms.logprobs
        logits = compute_logits(self._model, micro)
        if self._options.num_top is not None:
            scaled = at_least_float32(logits[:, : self._options.num_tokens]) / self._temperature
            x_UK, ids_UK = scaled.topk(self._options.num_top, dim=1)
            self._keep_top(ids_UK, x_UK, norms_U=torch.logsumexp(scaled, dim=1))
        return micro.gather_shards(logprobs_from_logits(logits, targets_T=micro.targets, temperature=self._temperature))

    def __call__(self, head: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self._has_tiles and self._options.num_top is not None:
            return  # `logprobs` reads the logits
        assert isinstance(head, nn.Linear), "checked when the teacher is loaded"
        (hidden,), weight = inputs, head.weight[: self._options.num_tokens]
        if self._options.num_top is None:
            self.columns = {HIDDEN: hidden.squeeze(0)}
            self.weight = weight.detach().clone() if self.weight is None else self.weight
        else:
            options = HeadOptions(
                chunk_tokens=tile_tokens(head, device=hidden.device), temperature=self._temperature, product=product
            )
            ids_UK, x_UK, norms_U = top_logprobs_from_hidden(
                hidden.squeeze(0), weight, num_top=self._options.num_top, options=options
            )
            self._keep_top(ids_UK, x_UK, norms_U=norms_U)

    def _keep_top(self, ids_UK: Tensor, x_UK: Tensor, *, norms_U: Tensor) -> None:
        self.columns = {TOP_IDS: ids_UK.int(), TOP_LOGPROBS: x_UK - norms_U[:, None]}
