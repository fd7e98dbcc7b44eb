"""The trainer rank as a Ray actor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import log_to, set_secrets, with_actor_name
from rlscale.training.spec import TrainerSpec
from rlscale.types import EngineAddress, Float32, StepPlan, TrainBatch, TrainResult, WeightSyncReport, WeightVersion
from rlscale.worker.policy import TrainWorker
from rlscale.worker.rank import WorldSpec


class _TrainActor(TrainWorker):
    """A trainer rank in an actor process. Health checks and waits for saves have threads of their own."""

    def __init__(self, spec: TrainerSpec, world: WorldSpec, *, rank: int, log_folder: Path) -> None:
        self.name = f"actor rank {rank}"
        log_to(log_folder, self.name)
        set_secrets(spec.train.env_vars)
        super().__init__(spec, world, rank=rank)

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Returns while the process lives."""

    @with_actor_name
    def setup(self, master_address: str, master_port: int) -> None:
        super().setup(master_address, master_port)

    @with_actor_name
    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        return super().train(batch, steps)

    @with_actor_name
    def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        return super().loss(batch, steps)

    @with_actor_name
    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None:
        super().score(batch, steps)

    @with_actor_name
    def estimate(self, values: Float32) -> Float32 | None:
        return super().estimate(values)

    @with_actor_name
    def improve(self) -> TrainResult:
        return super().improve()

    @with_actor_name
    def connect(self, engines: Sequence[EngineAddress]) -> None:
        super().connect(engines)

    @with_actor_name
    def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        return super().sync_weights(version)

    @with_actor_name
    def save(self, folder: Path) -> None:
        super().save(folder)

    @ray.method(concurrency_group="saving")
    @with_actor_name
    def finish_saving(self) -> None:
        super().finish_saving()

    @with_actor_name
    def load(self, folder: Path) -> None:
        super().load(folder)

    @with_actor_name
    def export_hf(self, folder: Path) -> None:
        super().export_hf(folder)


TrainActor: Any = ray.remote(concurrency_groups={"health": 1, "saving": 1})(_TrainActor)  # type: ignore[call-overload]
