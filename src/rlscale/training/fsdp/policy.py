"""The policy: the model that is trained on rollouts and sent to the engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlscale.training.backend import loss_of_column
from rlscale.training.fsdp.model import load_sharded
from rlscale.training.fsdp.policy_snapshots import Shards
from rlscale.training.fsdp.step import MicrobatchLoss, optimizer_step, policy_terms, score
from rlscale.training.loss.policy_loss import PolicyLoss, compare
from rlscale.training.metrics import MetricSums
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.optim.optimizer import make_optimizer
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.policy_snapshots import OldPolicies
from rlscale.training.rollout_state import Rollout, take_microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan


class Policy:
    """Model, optimiser and schedule. Every method is a collective.

    Example:
        policy = Policy(spec, mesh=mesh, device=device)
        policy.score_old(rollout)                                    # where `needs_old_pass` says so
        policy.step(rollout, plan=plan, micros=rollout.micros[0], is_first=True)
    """

    def __init__(self, spec: TrainerSpec, *, mesh: DeviceMesh, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self.model = load_sharded(spec.model_path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=True)
        self.optimizer = make_optimizer(self.model, optim=spec.optim)
        waits = 0 if spec.critic is None else spec.critic.num_only_steps
        self._schedule = LrSchedule.from_config(spec.optim, total_steps=spec.total_steps - waits)
        self.num_steps = 0  # made

    def score_old(self, rollout: Rollout, *, earlier: OldPolicies[Shards] | None = None) -> None:
        """Fills `old`, and the metrics that come from it. `earlier` versions score the tokens that they drew."""
        algo = self._spec.algo
        with rollout.timed("old_logprobs"):
            old = score(
                self.model,
                rollout.scored,
                num_tokens=len(rollout.batch.tokens),
                temperature=self._spec.temperature,
                entropies=rollout.metrics if algo.use_rollout_entropy else None,
            )
        rollout.has_entropy = algo.use_rollout_entropy
        if algo.use_rollout_logprobs:
            return
        rollout.old_logprobs = old
        if earlier is not None:
            with rollout.timed("old_logprobs"):
                earlier.score(rollout)
        for micro in rollout.flat:
            lp = take_microbatch(rollout.old_logprobs, micro)
            compare(rollout, micro, trainer=lp)
            rollout.logprob_collector.add(micro, lp)

    def measure(self, rollout: Rollout) -> None:
        """Adds the metric `loss`: the mean of -logprob over all trainable tokens."""
        num_tokens, temperature = len(rollout.batch.tokens), self._spec.temperature
        column = score(self.model, rollout.flat, num_tokens=num_tokens, temperature=temperature)
        loss_of_column(rollout, column)

    def step(
        self, rollout: Rollout, *, plan: StepPlan, micros: Sequence[Microbatch], is_first: bool
    ) -> dict[str, float]:
        """One optimiser step. Returns its metrics; raises as `optimizer_step`."""
        metrics = MetricSums(self._device)
        settings = StepSettings(
            number=self.num_steps,
            lr=self._schedule.at(self.num_steps),
            max_grad_norm=self._spec.optim.clip_grad,
        )
        loss_of = self._loss(rollout, plan=plan, metrics=metrics, is_first=is_first)
        result = optimizer_step(
            self.model, self.optimizer, micros=micros, loss_of=loss_of, metrics=metrics, settings=settings
        )
        self.num_steps += 1
        return result

    def _loss(self, rollout: Rollout, *, plan: StepPlan, metrics: MetricSums, is_first: bool) -> MicrobatchLoss:
        loss = PolicyLoss(self._spec, rollout, plan=plan, metrics=metrics, is_first=is_first, device=self._device)

        def loss_of(micro: Microbatch) -> Tensor:
            lp, entropy = policy_terms(
                self.model,
                micro,
                temperature=self._spec.temperature,
                entropy_grad=loss.entropy_grad,
                recompute=self._spec.train.recompute_loss_function,
            )
            return loss(micro, lp=lp, entropy=entropy)

        return loss_of
