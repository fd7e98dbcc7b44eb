"""One rank of a critic with its own GPUs.

Like `policy` it is imported by the driver, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult
from rlscale.worker.rank import RankWorker

if TYPE_CHECKING:
    from rlscale.training.critic_backend import CriticBackend


class CriticWorker(RankWorker):
    """Backend of one rank. `setup` comes first; every other method is called on all ranks of the critic alike.

    Example:
        worker = CriticWorker(spec, world, rank=0)
        worker.setup("127.0.0.1", port)
        values = worker.values(batch, steps)
    """

    role = "critic"
    _backend: CriticBackend

    def setup(self, master_address: str, master_port: int) -> None:
        """Joins the critic's world and loads its model (a collective)."""
        self._join(master_address, master_port)
        # Imported here: torch and transformers take seconds, for which the driver should not wait.
        from rlscale.training.registry import make_critic

        with self._profiler.report_oom():
            self._backend = make_critic(self._spec, rank=self.rank, world_size=self._world.world_size)

    def values(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Float32 | None:
        """Values of all tokens; from rank 0 only, as all ranks compute the same. [tokens]"""
        self._rollout_id = batch.rollout_id
        with self._profiler.report_oom():
            values = self._backend.values(batch, steps)
        return values if self.rank == 0 else None

    def train(self, returns: Float32) -> TrainResult:
        with self._profiler.report_oom(), self._profiler.profile_rollout(self._rollout_id):
            return self._backend.train(returns)

    def save(self, folder: Path) -> None:
        self._backend.save(folder)

    def finish_saving(self) -> None:
        self._backend.finish_saving()

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    def close(self) -> None:
        self._backend.close()
        self._profiler.close()
