"""The policy on Megatron-core: model, optimiser and schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from rlscale.training.loss.policy_loss import PolicyLoss
from rlscale.training.megatron.checkpoint.dist_checkpoint import load_weights, save_weights
from rlscale.training.megatron.hooks import call_before_logprobs, call_before_step
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.policy_snapshots import HostWeights
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.routing_replay import OwnRoutes, Routes
from rlscale.training.megatron.routing_replay_engine import EngineRoutes
from rlscale.training.megatron.step import score
from rlscale.training.megatron.trainable import TrainableModel
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader
from rlscale.training.optim.lr_schedule import LrSchedule
from rlscale.training.optim.step_checks import StepSettings
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns
from rlscale.training.spec import TrainerSpec


class MegatronPolicy:
    """This rank's part of the policy. Every method is a collective.

    Args:
        model: holding the weights that training begins with.
        on: where it is trained.
    """

    def __init__(self, model: MegatronModel, *, on: MegatronRank) -> None:
        self._spec, self._dims, self._device = on.spec, on.dims, on.device
        spec, dims = on.spec, on.dims
        self.model, self.head = model, OutputHead.from_model(model, spec, dims=dims)
        self.trained = TrainableModel(spec, model, optim=spec.optim, dims=dims, async_saver=on.async_saver)
        self.routes = _routes(spec, model, dims=dims)
        waits = 0 if spec.critic is None else spec.critic.num_only_steps
        self._schedule = LrSchedule.from_config(spec.optim, total_steps=spec.total_steps - waits)
        self.num_steps = 0  # made

    def add_to(self, offloader: Offloader, *, name: str) -> None:
        """Registers weights and optimiser state; no collective."""
        self.trained.add_to(offloader, name=name)

    def compute_logprobs(self, rollout: PackedRollout) -> Tensor:
        """See PolicyRole. [T]"""
        return self._score(rollout)

    def compute_old_logprobs(self, rollout: PackedRollout, *, entropies: MetricSums | None) -> Tensor:
        """See PolicyRole. Records or replays the experts of tokens, where the config asks for it. [T]"""
        with self.routes_of_old(rollout):
            return self._score(rollout, entropies=entropies)

    def train_step(self, rollout: PackedRollout, columns: TrainColumns, *, step: int) -> dict[str, float]:
        """See PolicyRole. Raises as `TrainableModel.step`."""
        metrics = MetricSums(self._device, group=self._dims.data_group)
        settings = StepSettings(
            number=self.num_steps,
            lr=self._schedule.at(self.num_steps),
            max_grad_norm=self._spec.optim.clip_grad,
        )
        loss = PolicyLoss(self._spec, rollout, columns, step=step, metrics=metrics, device=self._device)
        call_before_step(
            self._spec,
            self.trained.chunks,
            self.trained.optimizer,
            rollout_id=rollout.batch.version,
            step_id=self.num_steps,
        )
        with nullcontext() if self.routes is None else self.routes.replayed(rollout):
            loss_of = partial(self._micro_loss, loss)
            result = self.trained.step(rollout.micros[step], loss_of=loss_of, metrics=metrics, settings=settings)
        if self.routes is not None:
            result |= self.routes.measure()
        self.num_steps += 1
        return result

    def _micro_loss(self, loss: PolicyLoss, micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
        """A micro-batch's share of the loss, on the last stage."""
        logprobs, entropy = self.head.logprobs_and_entropy(
            hidden, decoder.head_weight, micro=micro, entropy_grad=loss.entropy_grad
        )
        return loss.compute(micro, logprobs=logprobs, entropy=entropy)

    def routes_of_old(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Context of a pass of old logprobs, in which routers record or replay their choices."""
        return nullcontext() if self.routes is None else self.routes.of_old(rollout)

    def _score(self, rollout: PackedRollout, *, entropies: MetricSums | None = None) -> Tensor:
        call_before_logprobs(self._spec, self.model.chunks, role="policy")
        return score_logprobs(self.model, rollout, dims=self._dims, head=self.head, entropies=entropies)


def _routes(spec: TrainerSpec, model: MegatronModel, *, dims: ParallelDims) -> Routes | None:
    """Where the experts of tokens come from; None: from the routers."""
    algo, shares_sequences = spec.algo, bool(model.config.sequence_parallel)
    if algo.use_rollout_routing_replay:
        layers = int(model.config.num_layers)
        return EngineRoutes(model.chunks, dims=dims, shares_sequences=shares_sequences, num_layers=layers)
    if algo.use_routing_replay and not algo.use_rollout_logprobs:  # else there is no pass of old logprobs
        return OwnRoutes(model.chunks, dims=dims, shares_sequences=shares_sequences)
    return None


class PolicyCopies:
    """The `SnapshotSource` of the policy: copies in the host's memory that take its place in its own chunks."""

    def __init__(self, policy: MegatronPolicy, *, on: MegatronRank) -> None:
        self._policy, self._dims, self._chunks = policy, on.dims, policy.model.chunks
        self._spec, self._async_saver = on.spec, on.async_saver

    def copy(self) -> HostWeights:
        return HostWeights(self._chunks)

    def score(self, rollout: PackedRollout, weights: HostWeights) -> Tensor:
        with weights.in_place_of(self._chunks), self._policy.routes_of_old(rollout):
            call_before_logprobs(self._spec, self._chunks, role="old_policy")
            return score_logprobs(self._policy.model, rollout, dims=self._dims, head=self._policy.head)

    def write(self, weights: HostWeights, folder: Path) -> None:
        with weights.in_place_of(self._chunks):
            save_weights(folder, model=self._policy.model, async_saver=self._async_saver)

    def read(self, folder: Path) -> HostWeights:
        weights = HostWeights(self._chunks)
        with weights.in_place_of(self._chunks):
            load_weights(folder, model=self._policy.model)
            weights.take(self._chunks)
        return weights


def score_logprobs(
    model: MegatronModel,
    rollout: PackedRollout,
    *,
    dims: ParallelDims,
    head: OutputHead,
    entropies: MetricSums | None = None,
) -> Tensor:
    """Logprobs by a model as a column of the batch, on every stage; a collective. [tokens]

    `entropies` is given `rollout/entropy` on the last stage; None: none is added.
    """

    def logprobs(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
        lp, entropy = head.logprobs_and_entropy(hidden, decoder.head_weight, micro=micro, entropy_grad=False)
        if entropies is not None:
            entropies.add({"rollout/entropy": micro.layout.sum_and_count(entropy)})
        return lp

    return score(model.chunks, rollout.scoring_micros, dims=dims, entries_of=logprobs, num_tokens=rollout.num_tokens)
