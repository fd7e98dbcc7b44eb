"""Inputs of the training loop, and the progress that it makes."""

from dataclasses import dataclass, field
from typing import Any

from rlscale.architectures.architecture import ForwardCost
from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import (
    LossType,
    RunConfig,
    TrainBackendName,
    UpdateMode,
    samples_otherwise,
    shares_prefixes,
    uses_critic,
)
from rlscale.config.rules import ranks_per_model
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.control.signals import StopRequest
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.user_evaluator import UserEvaluator
from rlscale.observe.reporter import Observer, diff_limit
from rlscale.protocols import RolloutSource, Trainers
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.rollout.timeline import Timelines
from rlscale.rollout.user_rollout import UserRollout
from rlscale.types import WeightVersion


@dataclass(kw_only=True, slots=True)
class Progress:
    """Position and results of a run; the part of a checkpoint that is not tensors."""

    next_rollout: int = 0
    version: WeightVersion = 0
    num_tokens: int = 0  # generated, over the whole run
    first_eval: float | None = None
    last_eval: float | None = None
    last_reward: float | None = None
    evaluated_version: WeightVersion | None = None
    evaluation_pending: bool = False  # it is due or runs: a resumed run starts it again
    evaluation_overdue: bool = False  # another one was due while it ran
    stopped: bool = False  # `eval.stop_reward` was reached

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """A run's config, the number of its rollouts, and the settings of the loop that follow from both.

    The number of rollouts depends on the data, and the cost of the model on its files: the config alone has neither.
    """

    run: RunConfig
    num_rollouts: int
    rollouts_per_epoch: int | None = None  # None: the run counts rollouts, not epochs
    forward_cost: ForwardCost | None = None  # of the policy; None: work is not balanced
    policy_cost: ForwardCost | None = None  # of the policy, for its MFU; None: not known

    def is_done(self, progress: Progress) -> bool:
        return progress.stopped or progress.next_rollout >= self.num_rollouts

    def ends_interval(self, interval: int, num_done: int) -> bool:
        """Whether an interval ends after `num_done` rollouts. The end of an epoch ends every interval."""
        per_epoch = self.rollouts_per_epoch
        return num_done % interval == 0 or (per_epoch is not None and num_done % per_epoch == 0)

    @property
    def _reads_rollouts(self) -> bool:
        """Whether samples are labels or come from files: they do not age, so that none is made ahead."""
        return self.run.algo.loss_type == LossType.sft_loss or self.run.debug.load_rollout_data is not None

    @property
    def max_staleness(self) -> int:
        return 0 if self._reads_rollouts else self.run.rollout.max_staleness

    @property
    def update_interval(self) -> int:
        """Rollouts from one weight sync to the next, at most `max_staleness` + 1."""
        return 1 if self._reads_rollouts else self.run.train.update_weights_interval

    @property
    def num_critic_only(self) -> int:
        """First rollouts that train only the critic, so that the policy's weights do not change."""
        return self.run.critic.num_critic_only_steps if uses_critic(self.run.algo) else 0

    @property
    def drains_before_update(self) -> bool:
        """Whether no request may span two weight versions."""
        return self.max_staleness > 0 and self.run.rollout.update_mode == UpdateMode.boundary

    @property
    def releases_engines(self) -> bool:
        """Whether engines release their GPU memory while the trainer works; `max_staleness` is 0 then."""
        return bool(self.run.cluster.offload_rollout)

    @property
    def saves_in_background(self) -> bool:
        """Whether trainers return from `save` before everything is on disk."""
        return self._has_megatron and self.run.megatron.async_save

    @property
    def mask_truncated(self) -> bool:
        """Whether truncated responses have no trainable token; labels (SFT) are never truncated."""
        return self.run.algo.overlong_filter and self.run.algo.loss_type != LossType.sft_loss

    def open_failure_watch(self) -> FailureWatch | None:
        """Counts failed trajectories; None: the run generates nothing."""
        if self._reads_rollouts:
            return None
        batch = self.run.batch
        num_trajectories = batch.rollout_batch_size * batch.n_samples_per_prompt
        return FailureWatch(max_share=self.run.sampling.max_failed_share, least=num_trajectories)

    @property
    def num_ranks(self) -> int:
        """Data-parallel trainer ranks."""
        cluster = self.run.cluster
        return max(1, cluster.actor_num_nodes * cluster.actor_num_gpus_per_node // ranks_per_model(self.run))

    @property
    def num_trainer_ranks(self) -> int:
        """Trainer ranks of the policy."""
        cluster = self.run.cluster
        return max(1, cluster.actor_num_nodes * cluster.actor_num_gpus_per_node)

    @property
    def context_ranks(self) -> int:
        """Trainer ranks that share a sample."""
        return (self.run.megatron if self._has_megatron else self.run.fsdp).context_parallel_size

    @property
    def shares_prefixes(self) -> bool:
        """Whether the trainer computes a prefix once for all samples of a micro-batch that begin with it."""
        run = self.run
        return not self._has_megatron and shares_prefixes(run.train, run.fsdp, device=run.cluster.device)

    @property
    def logprob_diff_limit(self) -> float:
        """Mean |trainer - engine| logprob above which a run with `ci.enabled` fails."""
        differs = samples_otherwise(self.run.rollout)
        return diff_limit(self.run.debug.logprob_diff_warn, self.run.train.dtype, samples_otherwise=differs)

    @property
    def _has_megatron(self) -> bool:
        return self.run.train.backend == TrainBackendName.megatron


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopDeps:
    """Objects that the loop drives. `evaluator` and `pool` are None where a run needs none (SFT without evaluation)."""

    source: RolloutSource
    trainers: Trainers
    store: CheckpointStore
    observer: Observer
    evaluator: Evaluator | UserEvaluator | None
    pool: EnginePool | None
    stop: StopRequest = field(default_factory=StopRequest)
    hooks: RolloutHooks = field(default_factory=RolloutHooks)
    user_rollout: UserRollout | None = None  # replaces the collection of rollouts
    timelines: Timelines | None = None  # of the trajectories of `source`; None: not recorded
