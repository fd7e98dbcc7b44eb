"""One trainer rank with its weight channel: a plain class that knows nothing of Ray.

The driver imports this module too, to make actors of the class, and does without torch: that takes it seconds.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlscale.engines.http import HttpEngine
from rlscale.training.spec import TrainerSpec
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightSyncReport, WeightVersion
from rlscale.weights.spec import ChannelSpec

if TYPE_CHECKING:
    from rlscale.training.fsdp.backend import FsdpBackend
    from rlscale.training.watch import Watch
    from rlscale.weights.channel import EngineChannel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """How the ranks find each other and the engines."""

    world_size: int
    backend: str  # "gloo" | "nccl"
    timeout_s: float
    single_node: bool
    channel: ChannelSpec


class TrainWorker:
    """Backend and weight channel of one rank. `setup` comes first; every other method is called on all ranks alike.

    Example (under torchrun):
        worker = TrainWorker(spec, world, rank=int(os.environ["RANK"]))
        worker.setup(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        worker.train(batch, steps)
    """

    def __init__(self, spec: TrainerSpec, world: WorldSpec, *, rank: int) -> None:
        self._spec, self._world, self.rank = spec, world, rank
        self._backend: FsdpBackend
        self._watch: Watch
        self._channel: EngineChannel
        if world.single_node and world.backend == "gloo":
            # gloo would listen on the address of the host's name; one machine needs no more than loopback.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this rank's machine, for rank 0 to gather the others on."""
        address = "127.0.0.1" if self._world.single_node else socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def setup(self, master_address: str, master_port: int) -> None:
        """Joins the world and loads the model (a collective)."""
        # Imported here: torch and transformers take seconds, which the driver should not wait for.
        from rlscale.training.distributed import join_world
        from rlscale.training.fsdp.backend import FsdpBackend
        from rlscale.training.watch import Watch
        from rlscale.weights.channels import make_channel

        world = self._world
        join_world(self.rank, world.world_size, master_address, master_port, world.backend, world.timeout_s)
        self._watch = Watch(self._spec.watch, rank=self.rank)
        with self._watch.memory():
            self._backend = FsdpBackend(self._spec, rank=self.rank, world_size=world.world_size)
        self._channel = make_channel(
            world.channel,
            make_engine=lambda address: HttpEngine(address, timeout_s=world.timeout_s),
            rank=self.rank,
            master_address=master_address,
        )
        log.info("rank %d of %d is ready", self.rank, world.world_size)

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        # The version of its weights is the number of rollouts before it.
        with self._watch.memory(), self._watch.rollout(batch.version):
            return self._backend.train(batch, steps)

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        self._channel.connect(engines)

    def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        report = self._channel.push(self._backend.weights(), version)
        self._backend.rest()
        return report

    def save(self, folder: Path) -> None:
        self._backend.save(folder)

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    def export_hf(self, folder: Path) -> None:
        self._backend.export_hf(folder)

    def close(self) -> None:
        self._channel.close()
        self._backend.close()
