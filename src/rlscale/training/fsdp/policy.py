"""The policy on FSDP2: the model that is trained on rollouts and sent to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from rlscale.training.fsdp.model import load_sharded
from rlscale.training.fsdp.rank import FsdpRank
from rlscale.training.fsdp.routing_replay import hook_routers
from rlscale.training.fsdp.step import (
    backward,
    compute_loss_terms,
    compute_policy_terms,
    computes_in_tiles,
    iterate_micros,
    optim_step,
    score_logprobs,
)
from rlscale.training.loss.policy_loss import PolicyLoss
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader, state_tensors
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.optim.optimizer import make_optimizer
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns


class FsdpPolicy:
    """Model, optimiser, schedule and routing replay; see `PolicyRole`.

    Every method but `add_to` is a collective of all ranks.

    Example:
        policy = FsdpPolicy(rank)
        policy.compute_old_logprobs(rollout, entropies=None)     # where `needs_old_pass`
        policy.train_step(rollout, columns, step=0)
    """

    def __init__(self, rank: FsdpRank) -> None:
        spec = rank.spec
        self._spec, self._device = spec, rank.device
        self.model = load_sharded(spec.model_path, mesh=rank.mesh, fsdp=spec.fsdp, train=spec.train, is_trained=True)
        self._routing_replay = hook_routers(self.model, spec.algo, grid=rank.grid, device=rank.device)
        self.optimizer = make_optimizer(self.model, optim=spec.optim)
        # While the critic trains alone, the policy makes no step: its schedule is that much shorter.
        num_waiting = 0 if spec.critic is None else spec.critic.num_only_steps
        self._schedule = LrSchedule.from_config(spec.optim, total_steps=max(1, spec.total_steps - num_waiting))
        self.num_steps = 0  # finished

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers parameters and optimiser state; no collective."""
        offloader.add(name, self.model.parameters)
        offloader.add(f"{name}.optimizer", partial(state_tensors, self.optimizer))

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See PolicyRole. [T]"""
        return self._score(rollout, entropies=None)

    def compute_old_logprobs(self, rollout: PackedRollout, *, entropies: MetricSums | None) -> Tensor:
        """See PolicyRole. Records or replays the routes of tokens if configured. [T]"""
        with self._recording(rollout):
            return self._score(rollout, entropies=entropies)

    def compute_snapshot_logprobs(self, rollout: PackedRollout) -> Tensor:
        """Logprobs while the model holds the weights of an earlier version; the engine's routes are replayed. [T]"""
        with self._recording(rollout):
            return self._score(rollout, entropies=None)

    def _recording(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        return nullcontext() if self._routing_replay is None else self._routing_replay.recording(rollout)

    def _score(self, rollout: PackedRollout, *, entropies: MetricSums | None) -> Tensor:
        return score_logprobs(
            self.model,
            rollout,
            temperature=self._spec.temperature,
            entropies=entropies,
            replay=self._routing_replay,
        )

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """Makes one optimiser step and returns its metrics. Raises as `optim_step`."""
        metrics = MetricSums(self._device)
        loss = PolicyLoss(self._spec, rollout, columns, step=step, metrics=metrics, device=self._device)
        replay = self._routing_replay
        with nullcontext() if replay is None else replay.replaying(rollout):
            self._forward_backward(rollout.micros[step], loss=loss, metrics=metrics)
        settings = StepSettings(
            number=self.num_steps,
            lr=self._schedule.at(self.num_steps),
            max_grad_norm=self._spec.optim.clip_grad,
        )
        result = optim_step(self.model, self.optimizer, metrics=metrics, settings=settings)
        if replay is not None:
            result |= replay.collect_metrics()
        self.num_steps += 1
        return result

    def _forward_backward(self, micros: Sequence[Microbatch], *, loss: PolicyLoss, metrics: MetricSums) -> None:
        """Accumulates the gradient over the micro-batches of a step."""
        for micro in iterate_micros(self.model, micros, replay=self._routing_replay):
            if loss.reads_logits or (loss.has_teacher and not computes_in_tiles(self.model)):
                logprobs, entropy, logits = compute_loss_terms(
                    self.model, micro, temperature=self._spec.temperature, entropy_grad=loss.entropy_grad
                )
                share = loss.compute(micro, logprobs=logprobs, entropy=entropy, logits=logits)
                backward(share, micro, metrics=metrics)
                continue
            terms = compute_policy_terms(
                self.model,
                micro,
                temperature=self._spec.temperature,
                entropy_grad=loss.entropy_grad,
                recompute=self._spec.train.recompute_loss_function,
                teacher=loss.teacher_request(micro),
            )
            share = loss.compute(micro, logprobs=terms.logprobs, entropy=terms.entropy, teacher_kl=terms.teacher_kl)
            backward(share, micro, metrics=metrics)
