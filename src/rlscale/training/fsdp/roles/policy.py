"""The policy: the model that is trained on rollouts and sent to the engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlscale.algo.corrections import logprob_difference
from rlscale.training.fsdp.model import load_sharded
from rlscale.training.fsdp.roles.old_policies import OldPolicies
from rlscale.training.fsdp.rollout import Rollout, pick
from rlscale.training.fsdp.step import MicrobatchLoss, StepSettings, optimizer_step, policy_terms, score
from rlscale.training.metrics import MetricSums
from rlscale.training.objective import TokenInputs, custom_weights, reduction, token_losses
from rlscale.training.optim import make_optimizer
from rlscale.training.packing import Microbatch
from rlscale.training.schedule import LrSchedule
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

    def score_old(self, rollout: Rollout, *, earlier: OldPolicies | None = None) -> None:
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
        rollout.old = old
        if earlier is not None:
            with rollout.timed("old_logprobs"):
                earlier.score(rollout, self.model, temperature=self._spec.temperature)
        for micro in rollout.flat:
            lp = pick(rollout.old, micro)
            _compare(rollout, micro, trainer=lp)
            rollout.asked.add(micro, lp)

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
        algo = self._spec.algo
        denominators_S = rollout.denominators(plan).to(self._device)
        weights_S = self._reducer_weights(rollout, plan=plan)
        # Without a pass for old logprobs, those of the policy count as long as no weight has changed.
        unchanged = is_first and (rollout.old is None or rollout.old is rollout.gen)
        compare = unchanged and rollout.gen is not None
        is_asked = algo.use_rollout_entropy and rollout.advantages is not None
        measures_entropy = is_asked and is_first and not rollout.has_entropy

        def loss_of(micro: Microbatch) -> Tensor:
            lp, entropy = policy_terms(
                self.model,
                micro,
                temperature=self._spec.temperature,
                entropy_grad=algo.entropy_coef != 0,
                recompute=self._spec.train.recompute_loss_function,
            )
            inputs = TokenInputs(
                old=pick(rollout.old, micro),
                gen=pick(rollout.gen, micro),
                ref=pick(rollout.ref, micro),
                advantages=pick(rollout.advantages, micro),
                weight_scale=rollout.weight_scale,
            )
            losses, sums = token_losses(
                algo, lp=lp, entropy=entropy, inputs=inputs, layout=micro.layout, custom=self._spec.custom
            )
            metrics.add(sums)
            if compare:
                _compare(rollout, micro, trainer=lp)
            if unchanged:
                rollout.asked.add(micro, lp)
            if measures_entropy:
                rollout.metrics.add({"rollout/entropy": micro.layout.sum_and_count(entropy)})
            samples = torch.from_numpy(micro.sample_indices).to(self._device)
            reduce = reduction(
                algo,
                plan=plan,
                layout=micro.layout,
                denominators_S=denominators_S[samples],
                max_response_len=self._spec.max_response_len,
                weights_S=None if weights_S is None else weights_S[samples],
            )
            return reduce(losses)

        return loss_of

    def _reducer_weights(self, rollout: Rollout, *, plan: StepPlan) -> Tensor | None:
        """Of every sample of the batch, where a function of the user's averages; 0 outside of this step. [S]"""
        path = self._spec.algo.custom_reducer_function_path
        if path is None:
            return None
        indices_S, samples = rollout.step_samples(plan, max_response_len=self._spec.max_response_len)
        weights_S = torch.zeros(rollout.batch.num_samples)
        weights_S[indices_S] = custom_weights(path, samples, custom=self._spec.custom).float().cpu()
        return weights_S.to(self._device)


def _compare(rollout: Rollout, micro: Microbatch, *, trainer: Tensor | None) -> None:
    """Adds the difference of trainer and engine logprobs: tokens of the current weights, and stale ones apart."""
    gen = pick(rollout.gen, micro)
    assert trainer is not None and gen is not None
    versions = torch.from_numpy(rollout.batch.weight_versions[micro.batch_rows]).to(gen.device)
    is_current = micro.layout.mask_T & (versions == rollout.batch.version)
    current = logprob_difference(trainer, gen_T=gen, mask_T=is_current)
    rollout.metrics.add(current.sums, prefix="logprob_diff/")
    rollout.metrics.add_max("logprob_diff/max", current.max_abs)
    stale = logprob_difference(trainer, gen_T=gen, mask_T=micro.layout.mask_T & ~is_current)
    rollout.metrics.add(stale.sums, prefix="logprob_diff/stale_")
