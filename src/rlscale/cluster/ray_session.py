"""Ray session of a run, started or attached, and the placement group inside it."""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlscale.cluster.attach import attach
from rlscale.cluster.process_reaper import reaped_session
from rlscale.config import ClusterConfig, Device
from rlscale.errors import ConfigError, Problem, WorkerError
from rlscale.plan.placement import Layout

SLOT = "rlscale_slot"
"""Custom resource that replaces a GPU on a machine without GPUs; the run creates as many as it needs."""

PLACEMENT_TIMEOUT_S = 120.0

LOCAL_STARTS = 3
_TOO_SLOW = "timed out during startup"  # in the message of the bare Exception that Ray raises

PASSIVE_OMP_ENV: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive"}
"""Environment of every actor, and through it of every engine; OpenMP reads it when torch is loaded.

Threads that spin while they wait make a step ten times as long as soon as another process needs their core, and
trainers, engines and driver share cores all the time.
"""

SPIN_OMP_ENV: Mapping[str, str] = {**PASSIVE_OMP_ENV, "GOMP_SPINCOUNT": "20000"}
"""The same for `cluster.spin_threads`: spins about 0.2 ms, and not at all in a process with more threads than cores."""

_logger = logging.getLogger(__name__)


@contextmanager
def ray_session(config: ClusterConfig, layout: Layout) -> Iterator["RaySession"]:
    """Ray for the duration of a run. A session that already exists is used and left running.

    Ray starts in the background, while the caller reads its data: call `wait` before the first use.
    """
    if ray.is_initialized():
        yield RaySession(config, layout, started=None)
        return
    if threading.current_thread() is threading.main_thread():
        # Schedulers end jobs with SIGTERM, which must end a run like Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        reaped_session(),
        _environment(worker_env(config)),
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray") as background,
    ):
        started = background.submit(_start, config, layout)
        try:
            yield RaySession(config, layout, started=started)
        finally:
            wait([started])
            ray.shutdown()


class RaySession:
    """Ray, which may still be starting."""

    def __init__(self, config: ClusterConfig, layout: Layout, *, started: "Future[None] | None") -> None:
        """Args:
        started: None: Ray is already running.
        """
        self._config, self._layout, self._started = config, layout, started

    def wait(self) -> None:
        """Waits until Ray can be used.

        Raises:
            ConfigError: Ray cannot be reached, or has fewer GPUs than the run needs.
            WorkerError: it did not start on this machine.
        """
        if self._started is not None:
            self._started.result()
        _check_capacity(self._config, self._layout)


def _start(config: ClusterConfig, layout: Layout) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this Ray hides the GPUs from actors that claim none, and warns that it will stop doing so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if address is not None:
        options |= {"runtime_env": {"env_vars": dict(worker_env(config))}}
    else:
        # Actors claim slots or GPUs, never CPUs: a laptop with two cores runs any number of small ranks.
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, layout.num_bundles)}
        if config.device == Device.cpu:
            options |= {"resources": {SLOT: layout.num_bundles}, "num_gpus": 0}
    if address is None:
        _start_local(options)
    else:
        attach(address, options)


def _start_local(options: Mapping[str, Any]) -> None:
    """Starts Ray on this machine, again if it exceeds Ray's own time limit, which cannot be set.

    The reaper ends the processes of a failed attempt.

    Raises:
        WorkerError: every attempt was too slow.
    """
    for attempt in range(1, LOCAL_STARTS + 1):
        try:
            # A failed attempt leaves its address in a file, where Ray would find it as that of a running cluster.
            ray.init(address=None if attempt == 1 else "local", **options)
        except Exception as error:
            if _TOO_SLOW not in str(error):
                raise
            _logger.warning("Ray did not start within 30 s (attempt %d of %d)", attempt, LOCAL_STARTS)
        else:
            return
    raise WorkerError(
        "Ray",
        f"did not start on this machine in {LOCAL_STARTS} attempts of 30 s; run again when it is less busy, or "
        "start Ray yourself (`ray start --head`) and set cluster.ray_address=auto",
    )


def worker_env(config: ClusterConfig) -> Mapping[str, str]:
    """Environment of every actor and engine: how OpenMP's threads wait for each other."""
    return SPIN_OMP_ENV if config.spin_threads and config.device == Device.cpu else PASSIVE_OMP_ENV


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables in this process's environment inside, so that every process it starts inherits them.

    A runtime environment of Ray would need new workers: it cannot change those that Ray starts in advance.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def bundle_resource(config: ClusterConfig) -> str:
    """Name of the resource that one bundle holds."""
    if config.device == Device.cuda:
        return "GPU"
    # A cluster that was started elsewhere has no slots; there one CPU replaces a GPU.
    return SLOT if SLOT in _cluster_resources() else "CPU"


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _check_capacity(config: ClusterConfig, layout: Layout) -> None:
    resource = bundle_resource(config)
    available = int(_cluster_resources().get(resource, 0))
    if available >= layout.num_bundles:
        return
    on_gpus = resource == "GPU"
    fix = (
        "add +on=cpu to run a small version of the experiment here, or set cluster.ray_address to a cluster that has "
        "them"
        if on_gpus
        else "request fewer ranks and engines, or a larger cluster"
    )
    split = f"{layout.num_trainers} for training, {layout.num_engines * layout.gpus_per_engine} for generation"
    shared = ", shared" if layout.colocate else ""
    shared += f", {layout.num_critics} for the critic" if layout.num_critics else ""
    raise ConfigError(
        [
            Problem(
                path="cluster",
                rule=f"fit on the {'GPUs' if on_gpus else resource + 's'} that Ray has",
                value=f"{layout.num_bundles} required ({split}{shared}) and {available} available",
                fix=fix,
            )
        ]
    )


@contextmanager
def placement_group_for(config: ClusterConfig, layout: Layout) -> Iterator["Bundles"]:
    """The placement group of a run, removed at the end."""
    resource = bundle_resource(config)
    if layout.num_bundles == 0:
        yield Bundles(None, resource)
        return
    bundle = {resource: 1.0} | ({"CPU": 1.0} if resource == "GPU" else {})
    group = placement_group([dict(bundle) for _ in range(layout.num_bundles)], strategy="PACK")
    try:
        if not group.wait(timeout_seconds=PLACEMENT_TIMEOUT_S):
            raise RuntimeError(
                f"Ray did not place {layout.num_bundles} bundles of 1 {resource} within {PLACEMENT_TIMEOUT_S:.0f} s; "
                "another run on this cluster may use them (see `ray status`)"
            )
        yield Bundles(group, resource)
    finally:
        remove_placement_group(group)


class Bundles:
    """Bundles of a placement group, ordered by node, so that ranks of one node are consecutive."""

    def __init__(self, group: PlacementGroup | None, resource: str) -> None:
        """Args:
        group: None: a run with only the driver, without trainers and with external engines.
        """
        self.group, self.resource = group, resource
        nodes: dict[int, str] = {} if group is None else placement_group_table(group)["bundles_to_node_id"]
        self._order = sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))
        self._nodes = [nodes[bundle] for bundle in self._order]
        self.num_nodes = len(set(self._nodes)) or 1

    def count_nodes(self, num_bundles: int) -> int:
        """Nodes of the first `num_bundles` bundles."""
        return len(set(self._nodes[:num_bundles])) or 1

    def options(self, bundle: int, share: float) -> dict[str, object]:
        """Ray options that place an actor on a bundle, with `share` of its resource."""
        claim: dict[str, object] = {"num_cpus": 0}
        if self.resource == "GPU":
            claim["num_gpus"] = share
        elif self.resource == "CPU":
            claim["num_cpus"] = share
        else:
            claim["resources"] = {self.resource: share}
        assert self.group is not None, "there is no bundle"
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self._order[bundle]
        )
        return {**claim, "scheduling_strategy": strategy, "max_restarts": 0, "max_task_retries": 0}
