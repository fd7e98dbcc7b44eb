"""All trainer ranks behind the `Trainers` protocol.

With a critic on ranks of its own a rollout goes back and forth between the two worlds:

    policy   score ─────┬─ estimate ─┬─ improve      optimiser steps
                        │            │
    critic   values ────┘            └─ train        optimiser steps

Calls in one column run at the same time.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import public_env
from rlscale.cluster.critic_actor import CriticActor
from rlscale.cluster.memory_saver_env import saver_variables
from rlscale.cluster.rank_group import RankGroup
from rlscale.cluster.ray_calls import settle
from rlscale.cluster.ray_session import Bundles
from rlscale.cluster.train_actor import TrainActor
from rlscale.data.microbatch_plan import plan_steps
from rlscale.plan.placement import Layout
from rlscale.training.spec import TrainerSpec
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightSyncReport, WeightVersion
from rlscale.worker.rank import WorldSpec


class RayTrainers:
    """Calls every rank alike and returns what rank 0 answers; the first failure of any rank is raised."""

    def __init__(self, spec: TrainerSpec, world: WorldSpec, layout: Layout, bundles: Bundles, log_folder: Path) -> None:
        # A process with variables of its own cannot be one that Ray started ahead; it comes up a little later.
        variables = {**public_env(spec.train.env_vars), **saver_variables(spec)}
        own = {"runtime_env": {"env_vars": variables}} if variables else {}
        self._spec = spec
        self._policy = RankGroup(
            "actor",
            [
                TrainActor.options(**bundles.options(rank, layout.share), **own, name=None).remote(
                    spec, world, rank=rank, log_folder=log_folder
                )
                for rank in range(layout.num_trainers)
            ],
        )
        apart = replace(world, world_size=layout.num_critics)
        self._critic = RankGroup(
            "critic",
            [
                CriticActor.options(**bundles.options(layout.first_critic + rank, 1.0), **own, name=None).remote(
                    spec, apart, rank=rank, log_folder=log_folder
                )
                for rank in range(layout.num_critics)
            ],
        )
        self.names = [*self._policy.names, *self._critic.names]

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return [*self._policy.named_actors, *self._critic.named_actors]

    async def setup(self) -> None:
        """Starts all ranks; returns when every one has loaded its model."""
        await settle([*await self._critic.setup(), *await self._policy.setup()])

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        if self._critic.names:
            return await self._train_both(batch, steps)
        shared = self._policy.shared
        result: TrainResult = await self._policy.call("train", shared(batch), shared(list(steps)))
        return result

    async def _train_both(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        everything, of_policy = ray.put(batch), ray.put(list(steps))
        of_critic = ray.put(await asyncio.to_thread(self._steps_of_critic, batch, list(steps)))
        values, _ = await self._both(
            self._critic.calls("values", everything, of_critic), self._policy.calls("score", everything, of_policy)
        )
        returns = await self._policy.call("estimate", ray.put(values))
        critics, policys = await self._both(
            self._critic.calls("train", ray.put(returns)), self._policy.calls("improve")
        )
        return TrainResult(
            steps=[{**mine, **theirs} for mine, theirs in zip(policys.steps, critics.steps, strict=True)],
            metrics=policys.metrics,
            seconds=policys.seconds | critics.seconds,
            logprobs=policys.logprobs,
        )

    def _steps_of_critic(self, batch: TrainBatch, steps: list[StepPlan]) -> list[StepPlan]:
        """The same steps, cut for as many ranks as the critic has."""
        critic = self._spec.critic
        assert critic is not None and critic.dedicated_ranks is not None, "a critic with ranks has them in the spec"
        if len(self._critic.names) == len(self._policy.names):
            return steps
        ranks, number = critic.dedicated_ranks, critic.dedicated_ranks.number // self._spec.ranks_per_model
        return plan_steps(batch, ranks.batch, num_ranks=number, context_ranks=self._spec.context_ranks)

    async def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        shared = self._policy.shared
        loss: float = await self._policy.call("loss", shared(batch), shared(list(steps)))
        return loss

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        await self._policy.call("connect", list(engines))

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        report: WeightSyncReport = await self._policy.call("sync_weights", version)
        return report

    async def save(self, folder: Path) -> None:
        await self._both(self._critic.calls("save", folder), self._policy.calls("save", folder))

    async def finish_saving(self) -> None:
        await self._both(self._critic.calls("finish_saving"), self._policy.calls("finish_saving"))

    async def load(self, folder: Path) -> None:
        await self._both(self._critic.calls("load", folder), self._policy.calls("load", folder))

    async def export_hf(self, folder: Path) -> None:
        await self._policy.call("export_hf", folder)

    async def _both(self, critics: list[Any], policys: list[Any]) -> tuple[Any, Any]:
        """What rank 0 of the critic (None: there is none) and rank 0 of the policy answer."""
        answers = await settle([*critics, *policys])
        return answers[0] if critics else None, answers[len(critics)]

    def kill(self) -> None:
        self._policy.kill()
        self._critic.kill()
