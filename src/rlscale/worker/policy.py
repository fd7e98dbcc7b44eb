"""One rank of the policy's trainer, with its weight channel.

The driver imports this module, too, for the classes of its actors, and without torch, whose import takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.protocols import WeightChannel
from rlscale.types import EngineAddress, Float32, StepPlan, TrainBatch, TrainResult, WeightVersion
from rlscale.weight_types import WeightSyncReport
from rlscale.worker.rank import RankWorker

if TYPE_CHECKING:
    from rlscale.training.profiling.device_rate import DeviceRate
    from rlscale.training.roles import TrainerRank
    from rlscale.weights.shared_base import SharedBase
    from rlscale.weights.sync import WeightSync


class PolicyWorker(RankWorker):
    """Backend and weight channel of one rank. `setup` comes first; every other method is called on all ranks alike.

    Example (under torchrun):
        worker = PolicyWorker(spec, world, rank=int(os.environ["RANK"]))
        worker.setup(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        worker.train(batch, steps)
    """

    _backend: TrainerRank
    _channel: WeightChannel
    _rate: DeviceRate

    def setup(self, master_address: str, master_port: int) -> None:
        """Joins the world and loads the model (a collective)."""
        self._join(master_address, master_port)
        # Imported here: torch and transformers take seconds, for which the driver should not wait.
        from rlscale.training.profiling.device_rate import DeviceRate
        from rlscale.training.registry import make_backend
        from rlscale.weights.adapter_sync import AdapterSource, AdapterSync
        from rlscale.weights.factory import make_channel, make_shared_base

        world = self._world
        with self._profiler.report_oom():
            self._backend = make_backend(self._spec, rank=self.rank, world_size=world.world_size)
        self._rate = DeviceRate(self._spec.device, self._spec.train.dtype)

        def make_engine(address: EngineAddress) -> HttpEngine:
            return HttpEngine(address, timeout_s=world.timeout_s)

        channel: WeightSync | SharedBase
        if world.channel.shares_base:
            channel = make_shared_base(
                world.channel, make_engine=make_engine, rank=self.rank, senders=self._backend.senders
            )
        else:
            channel = make_channel(
                world.channel,
                make_engine=make_engine,
                rank=self.rank,
                master_address=self._address,
                senders=self._backend.senders,
            )
        self._channel = channel
        if (adapters := self._backend.adapters) is not None:
            source = AdapterSource(
                base_weights=adapters.base_weights, config=adapters.config, num_kept=world.channel.num_adapters
            )
            self._channel = AdapterSync(channel, source=source, rank=self.rank)

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        with self._profiler.report_oom(), self._profiler.profile_rollout(batch.rollout_id):
            return self._with_rate(self._backend.train(batch, steps))

    def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        with self._profiler.report_oom():
            return self._backend.eval_loss(batch, steps)

    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None:
        """First part of `train`, before `compute_advantages` and `optimize`, where the critic has its own ranks."""
        self._rollout_id = batch.rollout_id
        with self._profiler.report_oom():
            self._backend.score(batch, steps)

    def compute_advantages(self, values: Float32) -> Float32 | None:
        """Returns of all tokens; from rank 0 only, as all ranks compute the same. [tokens]"""
        with self._profiler.report_oom():
            returns = self._backend.compute_advantages(values)
        return returns if self.rank == 0 else None

    def optimize(self) -> TrainResult:
        with self._profiler.report_oom(), self._profiler.profile_rollout(self._rollout_id):
            return self._with_rate(self._backend.optimize())

    def _with_rate(self, result: TrainResult) -> TrainResult:
        # The result of rank 0 is the one that the driver reads.
        if self.rank != 0:
            return result
        # The models are off the device, and the memory saver has unmapped its memory.
        with self._backend.exporting():
            return replace(result, device_flops=self._rate.flops())

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        with self._backend.exporting():
            self._channel.connect(engines)

    def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        source = self._backend.adapters or self._backend
        with self._backend.exporting():
            report = self._channel.push(source.weights(), version)
        # The engines generate next, and may share the GPUs of this rank.
        self._backend.offload()
        return report

    def save(self, folder: Path) -> None:
        self._backend.save(folder)

    def finish_saving(self) -> None:
        self._backend.finish_saving()

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    def export_hf(self, folder: Path) -> None:
        self._backend.export_hf(folder)

    def close(self) -> None:
        self._channel.close()
        self._backend.close()
        self._profiler.close()
