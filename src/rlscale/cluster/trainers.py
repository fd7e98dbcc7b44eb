"""All trainer ranks behind the `Trainers` protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.saver import saver_variables
from rlscale.cluster.session import Bundles
from rlscale.cluster.train_actor import TrainActor
from rlscale.cluster.train_worker import WorldSpec
from rlscale.cluster.watch import settle
from rlscale.plan.placement import Layout
from rlscale.training.spec import TrainerSpec
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightSyncReport, WeightVersion


class RayTrainers:
    """Calls every rank alike and returns what rank 0 answers; the first failure of any rank is raised."""

    def __init__(self, spec: TrainerSpec, world: WorldSpec, layout: Layout, bundles: Bundles, log_folder: Path) -> None:
        # A process with variables of its own cannot be one that Ray started ahead; it comes up a little later.
        variables = {**spec.train.env_vars, **saver_variables(spec)}
        own = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        self._actors = [
            TrainActor.options(**bundles.options(rank, layout.share), **own, name=None).remote(
                spec, world, rank=rank, log_folder=log_folder
            )
            for rank in range(layout.num_trainers)
        ]

        self.names = [f"actor rank {rank}" for rank in range(layout.num_trainers)]

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return list(zip(self.names, self._actors, strict=True)) if self._actors else []

    async def setup(self) -> None:
        """Starts all ranks; returns when every one has loaded its model."""
        [(address, port)] = await settle([("actor rank 0", self._actors[0].rendezvous.remote())])
        await self._call("setup", address, port)

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        result: TrainResult = await self._call("train", ray.put(batch), ray.put(list(steps)))
        return result

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        await self._call("connect", list(engines))

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        report: WeightSyncReport = await self._call("sync_weights", version)
        return report

    async def save(self, folder: Path) -> None:
        await self._call("save", folder)

    async def load(self, folder: Path) -> None:
        await self._call("load", folder)

    async def export_hf(self, folder: Path) -> None:
        await self._call("export_hf", folder)

    async def _call(self, method: str, *args: object) -> Any:
        calls = [(name, getattr(actor, method).remote(*args)) for name, actor in self.named_actors]
        return (await settle(calls))[0]

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
