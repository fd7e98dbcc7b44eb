"""The policy on Megatron-core: model, optimiser, learning-rate schedule and routing replay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from rlscale.training.loss.policy_loss import PolicyLoss
from rlscale.training.megatron.hooks import call_before_logprobs, call_before_step
from rlscale.training.megatron.model.adapted_layers import adapters_off
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.mtp_loss import MtpLoss
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.routing_replay import hook_routers
from rlscale.training.megatron.step import score_logprobs
from rlscale.training.megatron.trainable import TrainableModel
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns


class MegatronPolicy:
    """The rank's part of the policy; see `PolicyRole`.

    Args:
        model: with the weights that training starts from.
        rank: of the trainer.
    """

    def __init__(self, model: MegatronModel, *, rank: MegatronRank) -> None:
        spec = rank.spec
        self._rank = rank
        self.model, self.head = model, OutputHead.from_model(model, spec, dims=rank.dims)
        self.trainable = TrainableModel(model, optim=spec.optim, rank=rank)
        self._routing_replay = hook_routers(model, spec.algo, dims=rank.dims, device=rank.device)
        # While the critic trains alone, the policy makes no step: its schedule is that much shorter.
        num_waiting = 0 if spec.critic is None else spec.critic.num_only_steps
        self._schedule = LrSchedule.from_config(spec.optim, total_steps=max(1, spec.total_steps - num_waiting))
        self.num_steps = 0  # finished

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """See ModelRole."""
        self.trainable.add_to(offloader, name=name)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See PolicyRole; the same on every stage. [T]"""
        return self._score(rollout, role="policy")

    def compute_old_logprobs(self, rollout: PackedRollout, *, entropies: MetricSums | None) -> Tensor:
        """See PolicyRole; the same on every stage. Records or replays the routes of tokens if configured. [T]"""
        with self._recording(rollout):
            return self._score(rollout, role="policy", entropies=entropies)

    def compute_base_logprobs(self, rollout: PackedRollout) -> Tensor:
        """Logprobs without the adapters; the same on every stage. [T]"""
        with adapters_off(self.model.chunks):
            return self._score(rollout, role="reference")

    def compute_snapshot_logprobs(self, rollout: PackedRollout) -> Tensor:
        """Logprobs while the chunks hold the weights of an earlier version; the engine's routes are replayed. [T]"""
        with self._recording(rollout):
            return self._score(rollout, role="old_policy")

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """See PolicyRole."""
        spec, device = self._rank.spec, self._rank.device
        metrics = MetricSums(device, group=self._rank.dims.data_group)
        settings = StepSettings(
            number=self.num_steps,
            lr=self._schedule.at(self.num_steps),
            max_grad_norm=spec.optim.clip_grad,
        )
        loss = PolicyLoss(spec, rollout, columns, step=step, metrics=metrics, device=device)
        chunks, optimizer = self.trainable.chunks, self.trainable.optimizer
        call_before_step(spec, chunks, optimizer, rollout_id=rollout.batch.rollout_id, step_id=self.num_steps)
        replay = self._routing_replay
        with nullcontext() if replay is None else replay.replaying(rollout):
            stage_loss = partial(_stage_loss, head=self.head, loss=loss)
            mtp = self._mtp_loss(rollout, step=step, metrics=metrics)
            micros = rollout.micros[step]
            result = self.trainable.train_step(
                micros, loss=stage_loss, metrics=metrics, settings=settings, extra_loss=mtp
            )
        if replay is not None:
            result |= replay.collect_metrics()
        self.num_steps += 1
        return result

    def _mtp_loss(self, rollout: PackedRollout, *, step: int, metrics: MetricSums) -> MtpLoss | None:
        """The loss of layers for multi-token prediction; None: this rank trains none."""
        if not any(chunk.trains_mtp for chunk in self.model.chunks):
            return None
        return MtpLoss(self.model, self.head, rollout=rollout, step=step, metrics=metrics)

    def _recording(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        return nullcontext() if self._routing_replay is None else self._routing_replay.recording(rollout)

    def _score(self, rollout: PackedRollout, *, role: str, entropies: MetricSums | None = None) -> Tensor:
        call_before_logprobs(self._rank.spec, self.model.chunks, role=role)
        return score_logprobs(self.model, rollout, dims=self._rank.dims, head=self.head, entropies=entropies)


def _stage_loss(
    micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder, *, head: OutputHead, loss: PolicyLoss
) -> Tensor:
    """The micro-batch's share of the policy's loss, from its hidden states."""
    if loss.reads_logits:
        logprobs, entropy, logits = head.loss_terms(
            hidden, decoder.head_weight, micro=micro, entropy_grad=loss.entropy_grad
        )
        return loss.compute(micro, logprobs=logprobs, entropy=entropy, logits=logits)
    teacher = loss.teacher_request(micro)
    if teacher is not None:
        logprobs, entropy, teacher_kl = head.distillation_terms(
            hidden, decoder.head_weight, micro=micro, entropy_grad=loss.entropy_grad, teacher=teacher
        )
        return loss.compute(micro, logprobs=logprobs, entropy=entropy, teacher_kl=teacher_kl)
    logprobs, entropy = head.logprobs_and_entropy(
        hidden, decoder.head_weight, micro=micro, entropy_grad=loss.entropy_grad
    )
    return loss.compute(micro, logprobs=logprobs, entropy=entropy)
