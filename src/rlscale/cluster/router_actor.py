"""Ray actor that owns the router's process."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import log_to, with_actor_name
from rlscale.cluster.node_network import listen_address
from rlscale.engines.sglang.router_process import NAME, RouterLaunch, RouterProcess
from rlscale.errors import EngineError, WorkerError
from rlscale.types import EngineAddress


class _RouterActor:
    """Owns the router's process; when the actor dies the kernel ends the router."""

    def __init__(self, launch: RouterLaunch, *, log_folder: Path) -> None:
        self.name = NAME
        log_to(log_folder, self.name)
        self._launch, self._log_folder = launch, log_folder
        self._process: RouterProcess | None = None

    @with_actor_name
    def start(self, workers: Sequence[EngineAddress], timeout_s: float) -> EngineAddress:
        """Starts the router and waits until every engine is registered with it."""
        address, process = self._launch.open(
            self._log_folder, workers, host=listen_address(public=self._launch.api_key is not None)
        )
        process.start()
        # Set before the wait: `check` runs in another thread and reports a router that dies while it starts.
        self._process = process
        try:
            process.wait_ready(timeout_s)
        except EngineError as error:
            raise WorkerError(self.name, str(error), failed_at_s=time.time(), died=process.was_killed) from error
        return address

    @with_actor_name
    def replace_worker(self, old: str, new: EngineAddress) -> None:
        """Routes requests to an engine's new address instead of its old URL."""
        assert self._process is not None, "start comes first"
        self._process.replace_worker(old, new)

    @ray.method(concurrency_group="health")
    def check(self) -> str | None:
        """The reason why the router has ended; None while it runs."""
        return self._process.poll() if self._process is not None else None


RouterActor: Any = ray.remote(concurrency_groups={"health": 1}, num_cpus=0)(_RouterActor)  # type: ignore[call-overload]
