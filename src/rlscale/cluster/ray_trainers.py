"""All trainer ranks behind the `Trainers` protocol.

With a critic on dedicated ranks the calls of a rollout alternate between the two worlds:

    policy   score ─────┬─ compute_advantages ─┬─ optimize     optimiser steps
                        │                      │
    critic   values ────┘                      └─ train        optimiser steps

Calls in one column run at the same time.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import public_env
from rlscale.cluster.memory_saver_env import saver_variables
from rlscale.cluster.rank_actor import CriticActor, PolicyActor
from rlscale.cluster.rank_group import RankGroup
from rlscale.cluster.ray_calls import gather_calls
from rlscale.cluster.ray_session import Bundles
from rlscale.config import TrainBackendName, shares_prefixes
from rlscale.data.microbatch_plan import plan_steps
from rlscale.plan.placement import Layout
from rlscale.training.spec import TrainerSpec
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightVersion
from rlscale.weight_types import WeightSyncReport
from rlscale.worker.critic import CriticWorker
from rlscale.worker.policy import PolicyWorker
from rlscale.worker.rank import WorldSpec


class RayTrainers:
    """Calls every rank with the same arguments, and returns the result of rank 0 or the first failure of any rank."""

    def __init__(self, spec: TrainerSpec, world: WorldSpec, layout: Layout, bundles: Bundles, log_folder: Path) -> None:
        # An actor with its own environment cannot use a process that Ray started in advance, and starts later.
        variables = {**public_env(spec.train.env_vars), **saver_variables(spec)}
        options = {"runtime_env": {"env_vars": variables}} if variables else {}
        self._spec = spec
        self._policy = RankGroup(
            PolicyWorker.role,
            [
                PolicyActor.options(**bundles.actor_options(rank, layout.share), **options, name=None).remote(
                    spec, world, rank=rank, log_folder=log_folder
                )
                for rank in range(layout.num_trainers)
            ],
        )
        critic_world = replace(world, world_size=layout.num_critics)
        self._critic = RankGroup(
            CriticWorker.role,
            [
                CriticActor.options(
                    **bundles.actor_options(layout.first_critic + rank, 1.0), **options, name=None
                ).remote(spec, critic_world, rank=rank, log_folder=log_folder)
                for rank in range(layout.num_critics)
            ],
        )
        self.names = [*self._policy.names, *self._critic.names]

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return [*self._policy.named_actors, *self._critic.named_actors]

    async def setup(self) -> None:
        """Starts all ranks; returns when every one has loaded its model."""
        await gather_calls([*await self._critic.setup(), *await self._policy.setup()])

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        if self._critic.names:
            return await self._train_with_critic(batch, steps)
        result: TrainResult = await self._policy.call("train", *await self._share(batch, steps))
        return result

    async def _share(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> tuple[object, object]:
        """The two as arguments of all ranks. In a thread: storing a large batch takes a while."""
        shared = self._policy.shared
        return await asyncio.to_thread(lambda: (shared(batch), shared(list(steps))))

    async def _train_with_critic(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        # Stored once for both worlds; the two split the same steps for different numbers of ranks.
        batch_ref, policy_steps = await asyncio.to_thread(lambda: (ray.put(batch), ray.put(list(steps))))
        critic_steps = ray.put(await asyncio.to_thread(self._plan_critic_steps, batch, list(steps)))
        values, _ = await self._gather_both(
            self._critic.calls("values", batch_ref, critic_steps), self._policy.calls("score", batch_ref, policy_steps)
        )
        returns = await self._policy.call("compute_advantages", ray.put(values))
        critic, policy = await self._gather_both(
            self._critic.calls("train", ray.put(returns)), self._policy.calls("optimize")
        )
        result: TrainResult = replace(
            policy,
            steps=[{**ours, **theirs} for ours, theirs in zip(policy.steps, critic.steps, strict=True)],
            seconds=policy.seconds | critic.seconds,
        )
        return result

    def _plan_critic_steps(self, batch: TrainBatch, steps: list[StepPlan]) -> list[StepPlan]:
        """The same steps, split for the number of the critic's ranks."""
        critic = self._spec.critic
        assert critic is not None and critic.dedicated_ranks is not None, "a critic with ranks has them in the spec"
        if len(self._critic.names) == len(self._policy.names):
            return steps
        spec = self._spec
        has_fsdp = spec.train.backend == TrainBackendName.fsdp
        ranks, number = critic.dedicated_ranks, critic.dedicated_ranks.number // self._spec.ranks_per_model
        return plan_steps(
            batch,
            ranks.batch,
            num_ranks=number,
            context_ranks=self._spec.context_ranks,
            cost=ranks.cost,
            shares_prefixes=has_fsdp and shares_prefixes(spec.train, spec.fsdp, device=spec.device),
        )

    async def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        loss: float = await self._policy.call("eval_loss", *await self._share(batch, steps))
        return loss

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        await self._policy.call("connect", list(engines))

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        report: WeightSyncReport = await self._policy.call("sync_weights", version)
        return report

    async def save(self, folder: Path) -> None:
        await self._gather_both(
            self._critic.calls("save", folder.absolute()), self._policy.calls("save", folder.absolute())
        )

    async def finish_saving(self) -> None:
        await self._gather_both(self._critic.calls("finish_saving"), self._policy.calls("finish_saving"))

    async def load(self, folder: Path) -> None:
        await self._gather_both(
            self._critic.calls("load", folder.absolute()), self._policy.calls("load", folder.absolute())
        )

    async def export_hf(self, folder: Path) -> None:
        await self._policy.call("export_hf", folder.absolute())

    async def _gather_both(self, critic: list[Any], policy: list[Any]) -> tuple[Any, Any]:
        """Results of rank 0 of the critic (None: there is no critic) and of rank 0 of the policy."""
        results = await gather_calls([*critic, *policy])
        # Ranks of the critic come first, so that their number is the index of the policy's rank 0.
        return results[0] if critic else None, results[len(critic)]

    def kill(self) -> None:
        self._policy.kill()
        self._critic.kill()
