"""The policy's loss of a micro-batch and its metrics, from the logprobs that a backend computes.

Shape legend: R trainable tokens of a micro-batch, S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlscale.algo.corrections import logprob_difference
from rlscale.training.loss.token_loss import TokenInputs, custom_weights, reduction, token_losses
from rlscale.training.metrics import MetricSums
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import Rollout, take_microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan


class PolicyLoss:
    """The loss of one optimiser step, micro-batch by micro-batch.

    Example:
        loss = PolicyLoss(spec, rollout, plan=plan, metrics=metrics, is_first=True, device=device)
        lp, entropy = ...                                # of the policy, with gradient [R]
        loss(micro, lp=lp, entropy=entropy).backward()   # once for each micro-batch of this rank
    """

    def __init__(
        self,
        spec: TrainerSpec,
        rollout: Rollout,
        *,
        plan: StepPlan,
        metrics: MetricSums,
        is_first: bool,
        device: torch.device,
    ) -> None:
        self._spec, self._rollout, self._plan, self._metrics = spec, rollout, plan, metrics
        self._denominators_S = rollout.denominators(plan).to(device)
        self._weights_S = _reducer_weights(spec, rollout, plan=plan, device=device)
        # Without a pass for old logprobs, those of the policy count as long as no weight has changed.
        self._unchanged = is_first and (
            rollout.old_logprobs is None or rollout.old_logprobs is rollout.rollout_logprobs
        )
        is_asked = spec.algo.use_rollout_entropy and rollout.advantages is not None
        self._measures_entropy = is_asked and is_first and not rollout.has_entropy

    @property
    def entropy_grad(self) -> bool:
        """Whether the entropy is part of the loss."""
        return self._spec.algo.entropy_coef != 0

    def __call__(self, micro: Microbatch, *, lp: Tensor, entropy: Tensor) -> Tensor:
        """The micro-batch's share of the step's loss, with gradient; its metrics are added up beside it.

        Args:
            micro: of this rank.
            lp: logprobs of the policy. [R]
            entropy: likewise. [R]
        """
        rollout, layout, algo = self._rollout, micro.layout, self._spec.algo
        inputs = TokenInputs(
            old_logprobs=take_microbatch(rollout.old_logprobs, micro),
            rollout_logprobs=take_microbatch(rollout.rollout_logprobs, micro),
            ref_logprobs=take_microbatch(rollout.ref_logprobs, micro),
            advantages=take_microbatch(rollout.advantages, micro),
            mean_weight_factor=rollout.mean_weight_factor,
        )
        losses, sums = token_losses(
            algo, lp=lp, entropy=entropy, inputs=inputs, layout=layout, custom=self._spec.custom
        )
        self._metrics.add(sums)
        if self._unchanged and rollout.rollout_logprobs is not None:
            compare(rollout, micro, trainer=lp)
        if self._unchanged:
            rollout.logprob_collector.add(micro, lp)
        if self._measures_entropy:
            rollout.metrics.add({"rollout/entropy": layout.sum_and_count(entropy)})
        samples = torch.from_numpy(micro.sample_indices).to(lp.device)
        reduce = reduction(
            algo,
            plan=self._plan,
            layout=layout,
            denominators_S=self._denominators_S[samples],
            max_response_len=self._spec.max_response_len,
            weights_S=None if self._weights_S is None else self._weights_S[samples],
        )
        return reduce(losses)


def compare(rollout: Rollout, micro: Microbatch, *, trainer: Tensor | None) -> None:
    """Adds the difference of trainer and engine logprobs: tokens of the current weights, and stale ones apart."""
    gen = take_microbatch(rollout.rollout_logprobs, micro)
    assert trainer is not None and gen is not None
    versions = torch.from_numpy(rollout.batch.weight_versions[micro.batch_rows]).to(gen.device)
    is_current = micro.layout.mask_T & (versions == rollout.batch.version)
    current = logprob_difference(trainer, rollout_logprobs_T=gen, mask_T=is_current)
    rollout.metrics.add(current.sums, prefix="logprob_diff/")
    rollout.metrics.add_max("logprob_diff/max", current.max_abs)
    stale = logprob_difference(trainer, rollout_logprobs_T=gen, mask_T=micro.layout.mask_T & ~is_current)
    rollout.metrics.add(stale.sums, prefix="logprob_diff/stale_")


def _reducer_weights(spec: TrainerSpec, rollout: Rollout, *, plan: StepPlan, device: torch.device) -> Tensor | None:
    """Of every sample of the batch, where a function of the user averages; 0 outside of this step. [S]"""
    path = spec.algo.custom_reducer_function_path
    if path is None:
        return None
    indices_S, samples = rollout.step_samples(plan, max_response_len=spec.max_response_len)
    weights_S = torch.zeros(rollout.batch.num_samples)
    weights_S[indices_S] = custom_weights(path, samples, custom=spec.custom).float().cpu()
    return weights_S.to(device)
