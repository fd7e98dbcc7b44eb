"""Ray actor that owns one server process of an engine. Imports no torch, so that it starts at once."""

import logging
import time
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import log_to, with_actor_name
from rlscale.cluster.node_network import listen_address, use_node_interface
from rlscale.engines.launch import RENDEZVOUS_PORTS, EngineLaunch, NodeReport, ProcessPlace
from rlscale.engines.ports import reserve_port
from rlscale.engines.process import EngineProcess
from rlscale.errors import EngineError, WorkerError
from rlscale.types import EngineAddress

_logger = logging.getLogger(__name__)


class _EngineActor:
    """Owns one process of an engine; when the actor dies the kernel ends the process."""

    def __init__(self, launch: EngineLaunch, *, log_folder: Path) -> None:
        self.name = launch.name
        log_to(log_folder, self.name)
        self._launch, self._log_folder = launch, log_folder
        self._process: EngineProcess | None = None
        if launch.api_key is not None:
            use_node_interface()

    @with_actor_name
    def report(self) -> NodeReport:
        """Address and free ports of this node, and the GPUs that Ray gave to the actor."""
        host = listen_address(public=self._launch.api_key is not None)
        return NodeReport(
            host=host,
            port=reserve_port(host),
            rendezvous_port=reserve_port(host, number=RENDEZVOUS_PORTS),
            bootstrap_port=reserve_port(host) if self._launch.needs_bootstrap_port else None,
            gpus=own_gpus(),
        )

    @with_actor_name
    def launch(self, place: ProcessPlace) -> EngineAddress:
        """Starts the process; its address is the engine's if the node rank is 0."""
        address, process = self._launch.open(self._log_folder, place)
        _logger.info("%s starts at %s", self.name, address.url)
        process.start()
        self._process = process
        return address

    @with_actor_name
    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server is healthy. `check` runs in another thread and reports one that dies before."""
        process = self._process
        assert process is not None, "launch comes first"
        try:
            process.wait_ready(timeout_s)
        except EngineError as error:
            raise WorkerError(self.name, str(error), failed_at_s=time.time(), died=process.was_killed) from error

    @ray.method(concurrency_group="health")
    def check(self) -> str | None:
        """The reason why the process has ended; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


EngineActor: Any = ray.remote(concurrency_groups={"health": 1})(_EngineActor)  # type: ignore[call-overload]


def own_gpus() -> tuple[str, ...]:
    """CUDA devices that Ray gave to this actor or task; empty without GPUs."""
    return tuple(str(gpu) for gpu in ray.get_gpu_ids())


gpus_of_bundle: Any = ray.remote(own_gpus)
