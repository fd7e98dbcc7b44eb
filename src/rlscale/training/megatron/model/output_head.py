"""Logprobs from the hidden states of the last pipeline stage and this rank's part of the output layer.

Shape legend: R trainable tokens of a micro-batch, T positions of this rank, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.linear_distillation import TeacherRequest, logprobs_and_teacher_kl
from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden
from rlscale.algo.logprobs import logprobs_and_entropy
from rlscale.algo.ragged import at_least_float32
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.modules.logprob_head import TILE_ELEMENTS
from rlscale.training.modules.vocab_parallel import make_vocab_shard
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.spec import TrainerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputHead:
    """Settings of this rank's output layer, apart from its weights. Tensor-parallel ranks divide the vocabulary."""

    vocab_size: int  # without the padding rows
    first_token: int  # token id of this rank's first row
    temperature: float
    chunk_tokens: int = -1  # tokens whose logits exist at a time; not above 0: by TILE_ELEMENTS
    group: dist.ProcessGroup | None = None  # None: this rank has the whole vocabulary

    @classmethod
    def from_model(cls, model: MegatronModel, spec: TrainerSpec, *, dims: ParallelDims) -> OutputHead:
        """Settings for this rank's part of a model."""
        return cls(
            vocab_size=model.architecture.vocab_size,
            first_token=model.first_token,
            temperature=spec.temperature,
            chunk_tokens=spec.train.log_probs_chunk_size,
            group=dims.tensor_group if dims.tensor_size > 1 else None,
        )

    def logprobs_and_entropy(
        self, hidden: Tensor, weight: Tensor, *, micro: Microbatch, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of the trainable tokens and the entropy at their positions. Both [R], float32.

        A collective of the ranks that divide the vocabulary and of those that divide the samples. Each of the former
        gets the same numbers; each of the latter must compute the same loss from them.

        Args:
            hidden: normalised hidden states at the positions of this rank. [1, T, H]
            weight: this rank's rows of the output layer.
            micro: defines which positions predict which tokens.
            entropy_grad: the entropy is part of the loss.
        """
        both = self.entries(hidden, weight, rows=micro.logit_rows, targets=micro.targets, entropy_grad=entropy_grad)
        logprobs, entropy = micro.gather_shards(torch.stack(both, dim=-1)).unbind(dim=-1)
        return logprobs, entropy if entropy_grad else entropy.detach()

    def distillation_terms(
        self, hidden: Tensor, weight: Tensor, *, micro: Microbatch, entropy_grad: bool, teacher: TeacherRequest
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs and entropy as `logprobs_and_entropy`, and the divergence from a teacher. [R] each, float32.

        `teacher` has the entries of this rank, and of its whole distribution the tokens of this rank's rows.
        """
        columns = logprobs_and_teacher_kl(
            hidden.flatten(0, 1).index_select(0, micro.logit_rows),
            weight[: self._num_rows(weight)],
            targets_T=micro.targets,
            request=teacher.on_vocabulary(self.vocab_size),
            options=self.options(hidden, num_rows=len(weight), entropy_grad=entropy_grad),
        )
        logprobs, entropy, teacher_kl = micro.gather_shards(torch.stack(columns, dim=-1)).unbind(dim=-1)
        return logprobs, entropy if entropy_grad else entropy.detach(), teacher_kl

    def entries(
        self, hidden: Tensor, weight: Tensor, *, rows: Tensor, targets: Tensor, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of tokens and the entropy at their positions, both of this rank's positions. [U], [U]

        A collective of the ranks that divide the vocabulary. `rows` and `targets` are as in `Microbatch`, the other
        arguments as in `logprobs_and_entropy`.
        """
        options = self.options(hidden, num_rows=len(weight), entropy_grad=entropy_grad)
        chosen, own = hidden.flatten(0, 1).index_select(0, rows), weight[: self._num_rows(weight)]
        return logprobs_from_hidden(chosen, own, targets_T=targets, options=options)

    def _num_rows(self, weight: Tensor) -> int:
        """Rows without padding: the last ranks may have padding rows, or nothing else, outside of the softmax."""
        return max(min(len(weight), self.vocab_size - self.first_token), 0)

    def options(self, hidden: Tensor, *, num_rows: int, entropy_grad: bool = False) -> HeadOptions:
        """Options of the tiled logprobs for an output layer of `num_rows` on this rank."""
        tile = TILE_ELEMENTS[hidden.device.type] // num_rows
        return HeadOptions(
            chunk_tokens=self.chunk_tokens if self.chunk_tokens > 0 else max(1, tile),
            temperature=self.temperature,
            entropy_grad=entropy_grad,
            shard=None if self.group is None else make_vocab_shard(self.group, first=self.first_token),
        )

    def loss_terms(
        self, hidden: Tensor, weight: Tensor, *, micro: Microbatch, entropy_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs [R] and entropy [R] as `logprobs_and_entropy`, and the logits / temperature [R, V], float32.

        For a loss that reads logits. A collective of the ranks that divide the samples; arguments as above.
        """
        assert self.group is None, "a rule requires that no ranks divide the vocabulary"
        chosen = hidden.flatten(0, 1).index_select(0, micro.logit_rows)
        logits = at_least_float32(chosen @ weight[: self.vocab_size].T) / self.temperature
        logprobs, entropy = logprobs_and_entropy(logits, targets_T=micro.targets, entropy_grad=entropy_grad)
        columns = micro.gather_shards(torch.cat([logprobs[:, None], entropy[:, None], logits], dim=-1))
        entropy = columns[:, 1]
        return columns[:, 0], entropy if entropy_grad else entropy.detach(), columns[:, 2:]
