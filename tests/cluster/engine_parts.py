"""Engines of several GPUs on a Ray that counts more GPUs than exist."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.ray_engines import RayEngines
from rlscale.cluster.ray_session import Bundles, placement_group_for
from rlscale.config import ClusterConfig, Device
from rlscale.config.server_groups import ServerGroup, ServerRole
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.errors import WorkerError
from rlscale.plan.placement import Layout
from tests.fake_sglang import records

ON_GPUS = ClusterConfig(device=Device.cuda)


def groups_of_two_sizes(*, prefill: int, decode: int) -> tuple[ServerGroup, ...]:
    """Prefill engines of two GPUs and decode engines of four; `prefill` and `decode` are numbers of engines."""
    return (
        ServerGroup(role=ServerRole.prefill, num_gpus=2 * prefill, num_gpus_per_engine=2),
        ServerGroup(role=ServerRole.decode, num_gpus=4 * decode, num_gpus_per_engine=4),
    )


@contextmanager
def engines_of(launch: SglangLaunch, layout: Layout, folder: Path) -> Iterator[tuple[RayEngines, Bundles]]:
    """Engines on the bundles of a layout, not started yet, and the bundles."""

    def refuse(failure: WorkerError) -> None:
        raise failure

    with placement_group_for(ON_GPUS, layout) as bundles:
        engines = RayEngines(launch, layout, bundles, log_folder=folder, on_killed=refuse)
        try:
            yield engines, bundles
        finally:
            engines.kill()


def gpus_of_trainers(bundles: Bundles, layout: Layout) -> list[str]:
    """The GPU of each trainer rank, from an actor in its place."""
    actors = [
        _RankActor.options(**bundles.actor_options(rank, layout.share)).remote() for rank in range(layout.num_trainers)
    ]
    return [gpu for gpus in ray.get([actor.gpus.remote() for actor in actors]) for gpu in gpus]


class _Rank:
    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


_RankActor: Any = ray.remote(_Rank)


def last_launch(folder: Path, process: str) -> dict[str, Any]:
    return records(folder, process, "launches")[-1]


def visible_gpus(folder: Path, process: str) -> list[str]:
    found: list[str] = last_launch(folder, process)["environ"]["CUDA_VISIBLE_DEVICES"].split(",")
    return found


async def wait_dead(engines: RayEngines, *, within_s: float = 20) -> dict[int, str]:
    """The dead engines, once there are some."""
    end = time.monotonic() + within_s
    while not (dead := await engines.find_dead()) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return dead


def has_ended(pid: int, *, within_s: float = 20) -> bool:
    end = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()
