"""Loss of the layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

With D layers and the targets M_k of layer k in the whole step:

    L = factor / D * sum over k of 1 / |M_k| * sum over t in M_k of -log p_k(t)

The temperature of sampling does not apply: a draft is compared with the distribution of the model itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.model.model_inputs import MegatronMicrobatch
from rlscale.training.megatron.model.mtp_targets import count_targets
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.metrics import MetricSums
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout


class MtpLoss:
    """The loss of one optimiser step, micro-batch by micro-batch, as a `StageFunction`.

    Args:
        model: with layers that are trained.
        head: of the policy.
        rollout: that is trained on.
        step: index of the step in the rollout.
        metrics: gets `mtp_loss`, the loss without the factor.
    """

    def __init__(
        self, model: MegatronModel, head: OutputHead, *, rollout: PackedRollout, step: int, metrics: MetricSums
    ) -> None:
        self._head, self._metrics = replace(head, temperature=1.0), metrics
        self._factor = float(model.config.mtp_loss_scaling_factor)
        depths, plan = range(1, model.config.mtp_num_layers + 1), rollout.steps[step]
        self._weights = [1 / len(depths) / max(1, count_targets(rollout.batch, plan, depth=k)) for k in depths]

    def __call__(self, micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
        """The micro-batch's share of the loss of the step; adds its metric.

        Args:
            micro: of this rank.
            hidden: of the model and of each layer. [(1 + D) B, L, H]
            decoder: the last chunk.
        """
        assert isinstance(micro, MegatronMicrobatch) and len(micro.mtp) == len(self._weights), "packed for these layers"
        _, *states = hidden.chunk(1 + len(self._weights))
        weight, total = decoder.head_weight.detach(), hidden.new_zeros(()).float()
        for own, targets, share in zip(states, micro.mtp, self._weights, strict=True):
            entries, _ = self._head.entries(own, weight, rows=targets.logit_rows, targets=targets.targets)
            total = total - share * (targets.gather(entries) * targets.mask).sum()
        self._metrics.add_share("mtp_loss", total)
        return self._factor * total
