"""Ray actor that owns the server process of an engine. Imports no torch, so that it starts at once."""

import time
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.actor_process import log_to, with_actor_name
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.process import EngineProcess
from rlscale.errors import EngineError, WorkerError
from rlscale.types import EngineAddress


class _EngineActor:
    """Owns the server process of one engine; when the actor dies the kernel ends the server."""

    def __init__(self, launch: EngineLaunch, *, log_folder: Path) -> None:
        self.name = launch.name
        log_to(log_folder, self.name)
        self._launch, self._log_folder = launch, log_folder
        self._process: EngineProcess | None = None

    @with_actor_name
    def start(self, timeout_s: float) -> EngineAddress:
        """Starts the server and waits until it is healthy."""
        address, process = self._launch.open(self._log_folder)
        process.start()
        # Set before the wait: `check` runs in another thread and reports a server that dies while it starts.
        self._process = process
        try:
            process.wait_ready(timeout_s)
        except EngineError as error:
            raise WorkerError(self.name, str(error), failed_at_s=time.time(), died=process.was_killed) from error
        return address

    @ray.method(concurrency_group="health")
    def check(self) -> str | None:
        """The reason why the server has ended; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


EngineActor: Any = ray.remote(concurrency_groups={"health": 1})(_EngineActor)  # type: ignore[call-overload]
