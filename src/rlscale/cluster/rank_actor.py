"""Ray actors around workers: ranks of the policy's trainer, and of a critic with its own GPUs."""

from pathlib import Path
from typing import Any, ClassVar

import ray

from rlscale.cluster.actor_process import log_to, named_failures, set_secret_env
from rlscale.cluster.node_network import listen_address, use_node_interface
from rlscale.training.spec import TrainerSpec
from rlscale.worker.critic import CriticWorker
from rlscale.worker.policy import PolicyWorker
from rlscale.worker.rank import RankWorker, WorldSpec

CONCURRENCY_GROUPS = {"finish_saving": "saving"}
"""Methods of workers that run concurrently with the others, in separate threads."""


class _RankActor:
    """A worker in an actor process. Health checks and waits for saves have separate threads."""

    worker_class: ClassVar[type[RankWorker]]

    def __init__(self, spec: TrainerSpec, world: WorldSpec, *, rank: int, log_folder: Path) -> None:
        self.name = f"{self.worker_class.role} rank {rank}"
        log_to(log_folder, self.name)
        set_secret_env(spec.train.env_vars)
        if not world.single_node:
            use_node_interface()
        address = listen_address(public=not world.single_node)
        self._worker = self.worker_class(spec, world, rank=rank, address=address)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the worker. Ray has replaced references in `args` by their values."""
        with named_failures(self.name, method):
            return getattr(self._worker, method)(*args)

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Returns while the process lives."""


# Two classes, because Ray shows the name of the class as the name of the process.
class _PolicyActor(_RankActor):
    worker_class = PolicyWorker


class _CriticActor(_RankActor):
    worker_class = CriticWorker


_remote: Any = ray.remote(concurrency_groups={"health": 1, "saving": 1})  # type: ignore[call-overload]
PolicyActor: Any = _remote(_PolicyActor)
CriticActor: Any = _remote(_CriticActor)
