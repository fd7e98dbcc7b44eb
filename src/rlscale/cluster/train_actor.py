"""The trainer rank as a Ray actor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import log_to, set_secrets, stamped
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

    @stamped
    def setup(self, master_address: str, master_port: int) -> None:
        super().setup(master_address, master_port)

    @stamped
    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        return super().train(batch, steps)

    @stamped
    def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        return super().loss(batch, steps)

    @stamped
    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None:
        super().score(batch, steps)

    @stamped
    def estimate(self, values: Float32) -> Float32 | None:
        return super().estimate(values)

    @stamped
    def improve(self) -> TrainResult:
        return super().improve()

    @stamped
    def connect(self, engines: Sequence[EngineAddress]) -> None:
        super().connect(engines)

    @stamped
    def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        return super().sync_weights(version)

    @stamped
    def save(self, folder: Path) -> None:
        super().save(folder)

    @ray.method(concurrency_group="saving")
    @stamped
    def finish_saving(self) -> None:
        super().finish_saving()

    @stamped
    def load(self, folder: Path) -> None:
        super().load(folder)

    @stamped
    def export_hf(self, folder: Path) -> None:
        super().export_hf(folder)


TrainActor: Any = ray.remote(concurrency_groups={"health": 1, "saving": 1})(_TrainActor)  # type: ignore[call-overload]
