"""Rendezvous of ranks of every kind.

The driver imports this module, too, for the classes of its actors, and without torch, whose import takes seconds.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlscale.training.listener import listen
from rlscale.training.registry import no_collections
from rlscale.training.spec import TrainerSpec
from rlscale.weights.channel_spec import ChannelSpec

if TYPE_CHECKING:
    from rlscale.training.profiling.profiler import RankProfiler

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """Process group of the ranks, and the weight channel of the policy's ranks."""

    world_size: int
    backend: str  # "gloo" | "nccl"
    timeout_s: float
    single_node: bool
    channel: ChannelSpec


class RankWorker:
    """One rank of a world: the ranks that train the same models."""

    role = "actor"

    def __init__(self, spec: TrainerSpec, world: WorldSpec, *, rank: int, address: str | None = None) -> None:
        """Args:
        address: of this machine for the other processes of the run. None: loopback, or with several machines the
            address of the host name.
        """
        self._address = address or ("127.0.0.1" if world.single_node else socket.gethostbyname(socket.gethostname()))
        self._spec, self._world, self.rank = spec, world, rank
        self._profiler: RankProfiler
        self._rollout_id = 0  # of a rollout that takes several calls
        self._listener: socket.socket | None = None
        if world.single_node and world.backend == "gloo":
            # gloo would listen on the address of the host's name; one machine needs only loopback.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def rendezvous(self) -> tuple[str, int]:
        """Address and port of this rank, 0, for the others. It listens from now on, so that the port stays its own."""
        self._listener = listen(self._address)
        return self._address, self._listener.getsockname()[1]

    def _join(self, master_address: str, master_port: int) -> None:
        """Joins the world (a collective)."""
        with no_collections():
            # Imported here: torch takes seconds, for which the driver should not wait.
            from rlscale.training.distributed import join_world
            from rlscale.training.profiling.profiler import RankProfiler

        world = self._world
        # Rank 0 passes its open socket on; the others connect to the port.
        port, self._listener = self._listener or master_port, None
        join_world(self.rank, world.world_size, master_address, port, world.backend, world.timeout_s)
        self._profiler = RankProfiler(self._spec.profiler, rank=self.rank, role=self.role)
        log.info("%s rank %d of %d has joined", self.role, self.rank, world.world_size)
