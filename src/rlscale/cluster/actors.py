"""The plain workers as Ray actors: logs into the run folder, failures stamped with rank and time."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from rlscale.cluster.train_worker import TrainWorker, WorldSpec
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.process import EngineProcess
from rlscale.errors import WorkerError
from rlscale.training.spec import TrainerSpec
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightSyncReport, WeightVersion

P = ParamSpec("P")
R = TypeVar("R")


def _stamped(method: Callable[Concatenate[Any, P], R]) -> Any:
    """Turns any failure of a method into a WorkerError that names the actor and the moment."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except WorkerError:
            raise  # it names its worker, which may be another rank, already
        except Exception as error:
            failed_at_s = time.time()
            logging.getLogger(__name__).exception("%s failed in %s", self.name, method.__name__)
            raise WorkerError(self.name, f"{type(error).__name__}: {error}", failed_at_s=failed_at_s) from error

    return call


def log_to(folder: Path, name: str) -> None:
    """Sends this process's log records to `<folder>/<name>.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"{name.replace(' ', '_')}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _TrainActor(TrainWorker):
    """A trainer rank in an actor process. Health checks have a thread of their own; all else runs in one thread."""

    def __init__(self, spec: TrainerSpec, world: WorldSpec, *, rank: int, log_folder: Path) -> None:
        self.name = f"actor rank {rank}"
        log_to(log_folder, self.name)
        super().__init__(spec, world, rank=rank)

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Returns while the process lives."""

    @_stamped
    def setup(self, master_address: str, master_port: int) -> None:
        super().setup(master_address, master_port)

    @_stamped
    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        return super().train(batch, steps)

    @_stamped
    def connect(self, engines: Sequence[EngineAddress]) -> None:
        super().connect(engines)

    @_stamped
    def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        return super().sync_weights(version)

    @_stamped
    def save(self, folder: Path) -> None:
        super().save(folder)

    @_stamped
    def load(self, folder: Path) -> None:
        super().load(folder)

    @_stamped
    def export_hf(self, folder: Path) -> None:
        super().export_hf(folder)


class _EngineActor:
    """Owns the server process of one engine; when the actor dies the kernel ends the server."""

    def __init__(self, launch: EngineLaunch, *, log_folder: Path) -> None:
        self.name = launch.name
        log_to(log_folder, self.name)
        self._launch, self._log_folder = launch, log_folder
        self._process: EngineProcess | None = None

    @_stamped
    def start(self, timeout_s: float) -> EngineAddress:
        """Starts the server and waits until it is healthy."""
        address, process = self._launch.open(self._log_folder)
        process.start()
        self._process = process  # from here on `check`, in its own thread, looks at it
        process.wait_ready(timeout_s)
        return address

    @ray.method(concurrency_group="health")
    def check(self) -> str | None:
        """Why the server is no longer there; None while it lives."""
        return self._process.poll() if self._process is not None else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


TrainActor: Any = ray.remote(concurrency_groups={"health": 1})(_TrainActor)  # type: ignore[call-overload]
EngineActor: Any = ray.remote(concurrency_groups={"health": 1})(_EngineActor)  # type: ignore[call-overload]
