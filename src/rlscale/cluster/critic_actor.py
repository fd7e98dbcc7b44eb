"""A rank of the critic as a Ray actor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import log_to, set_secrets, with_actor_name
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult
from rlscale.worker.critic import CriticWorker
from rlscale.worker.rank import WorldSpec


class _CriticActor(CriticWorker):
    """A critic's rank in an actor process. Health checks and waits for saves have threads of their own."""

    def __init__(self, spec: TrainerSpec, world: WorldSpec, *, rank: int, log_folder: Path) -> None:
        self.name = f"critic rank {rank}"
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
    def values(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Float32 | None:
        return super().values(batch, steps)

    @with_actor_name
    def train(self, returns: Float32) -> TrainResult:
        return super().train(returns)

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


CriticActor: Any = ray.remote(concurrency_groups={"health": 1, "saving": 1})(_CriticActor)  # type: ignore[call-overload]
