"""One Ray session, started or attached, and the bundles of a run inside it."""

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
from rlscale.cluster.process_reaper import guarded_session
from rlscale.config import ClusterConfig, Device
from rlscale.errors import ConfigError, Problem, WorkerError
from rlscale.plan.placement import Layout

SLOT = "rlscale_slot"
"""Custom resource that stands for a GPU where there is none; as many as the run asks for."""

PLACEMENT_TIMEOUT_S = 120.0

LOCAL_STARTS = 3
_TOO_SLOW = "timed out during startup"  # of the bare Exception that Ray raises

PASSIVE_OMP_ENV: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive"}
"""Environment of every actor, and through it of every engine; OpenMP reads it when torch is loaded.

Threads that wait by spinning make a step ten times as long as soon as another process wants their core, and trainers,
engines and driver may share cores all the time.
"""

SPIN_OMP_ENV: Mapping[str, str] = {**PASSIVE_OMP_ENV, "GOMP_SPINCOUNT": "20000"}
"""The same for `cluster.spin_threads`: about 0.2 ms, and none where a process has more such threads than cores."""

_logger = logging.getLogger(__name__)


@contextmanager
def ray_session(config: ClusterConfig, layout: Layout) -> Iterator["RaySession"]:
    """Ray for the duration of a run; a session that was already there is used and left alone.

    It starts in the background, while the caller reads what it needs: call `wait` before Ray is used.
    """
    if ray.is_initialized():
        yield RaySession(config, layout, started=None)
        return
    if threading.current_thread() is threading.main_thread():
        # A scheduler ends jobs with SIGTERM: it is to end a run as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        guarded_session(),
        _inherited(worker_variables(config)),
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray") as background,
    ):
        started = background.submit(_start, config, layout)
        try:
            yield RaySession(config, layout, started=started)
        finally:
            wait([started])
            ray.shutdown()


class RaySession:
    """Ray, which may still be on its way."""

    def __init__(self, config: ClusterConfig, layout: Layout, *, started: "Future[None] | None") -> None:
        """Args:
        started: None: it was there.
        """
        self._config, self._layout, self._started = config, layout, started

    def wait(self) -> None:
        """Returns once Ray can be used.

        Raises:
            ConfigError: Ray cannot be reached, or sees fewer GPUs than the run needs.
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
        options |= {"runtime_env": {"env_vars": dict(worker_variables(config))}}
    else:
        # Actors claim slots or GPUs, never CPUs: a laptop with two cores hosts any number of small ranks.
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, layout.num_bundles)}
        if config.device == Device.cpu:
            options |= {"resources": {SLOT: layout.num_bundles}, "num_gpus": 0}
    if address is None:
        _init_here(options)
    else:
        attach(address, options)


def _init_here(options: Mapping[str, Any]) -> None:
    """Starts Ray on this machine, again where it misses the time that Ray itself gives, which cannot be set.

    What a failed attempt leaves behind is ended by the guardian.

    Raises:
        WorkerError: no attempt was in time.
    """
    for attempt in range(1, LOCAL_STARTS + 1):
        try:
            # After a failed attempt its address lies about, which `None` would take for that of a cluster.
            ray.init(address=None if attempt == 1 else "local", **options)
        except Exception as error:
            if _TOO_SLOW not in str(error):
                raise
            _logger.warning("Ray did not start within its 30 s (attempt %d of %d)", attempt, LOCAL_STARTS)
        else:
            return
    raise WorkerError(
        "Ray",
        f"did not start on this machine, {LOCAL_STARTS} times in 30 s each; run again when it is less busy, or "
        "start Ray yourself (`ray start --head`) and give cluster.ray_address=auto",
    )


def worker_variables(config: ClusterConfig) -> Mapping[str, str]:
    """How threads of every actor, and of every engine, wait for each other."""
    return SPIN_OMP_ENV if config.spin_threads and config.device == Device.cpu else PASSIVE_OMP_ENV


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables in this process' environment meanwhile: what it starts has them from its first moment.

    A runtime environment would do as well, but for the processes that Ray starts ahead: they could not be used.
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
    # A cluster that somebody else started knows no slots; there one CPU stands for a GPU.
    return SLOT if SLOT in _cluster_resources() else "CPU"


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _check_capacity(config: ClusterConfig, layout: Layout) -> None:
    resource = bundle_resource(config)
    have = int(_cluster_resources().get(resource, 0))
    if have >= layout.num_bundles:
        return
    on_gpus = resource == "GPU"
    fix = (
        "add +on=cpu to run the same experiment here, small, or give cluster.ray_address of a cluster that has them"
        if on_gpus
        else "ask for fewer ranks and engines, or a larger cluster"
    )
    split = f"{layout.num_trainers} for training, {layout.num_engines * layout.gpus_per_engine} for generation"
    shared = ", shared" if layout.colocate else ""
    shared += f", {layout.num_critics} for the critic" if layout.num_critics else ""
    raise ConfigError(
        [
            Problem(
                path="cluster",
                rule=f"fit on the {'GPUs' if on_gpus else resource + 's'} that Ray sees",
                value=f"a need of {layout.num_bundles} ({split}{shared}) and {have} there",
                fix=fix,
            )
        ]
    )


@contextmanager
def placement_group_for(config: ClusterConfig, layout: Layout) -> Iterator["Bundles"]:
    """The placement group of a run; given back at the end."""
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
                "another run on this cluster may hold them (see `ray status`)"
            )
        yield Bundles(group, resource)
    finally:
        remove_placement_group(group)


class Bundles:
    """Bundles in an order in which neighbours share a node, so that ranks of one node are consecutive."""

    def __init__(self, group: PlacementGroup | None, resource: str) -> None:
        """Args:
        group: None: a run of the driver alone, without trainers and with engines that run already.
        """
        self.group, self.resource = group, resource
        nodes: dict[int, str] = {} if group is None else placement_group_table(group)["bundles_to_node_id"]
        self._order = sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))
        self._nodes = [nodes[bundle] for bundle in self._order]
        self.num_nodes = len(set(self._nodes)) or 1

    def num_nodes_of(self, number: int) -> int:
        """Nodes on which the first `number` bundles lie."""
        return len(set(self._nodes[:number])) or 1

    def options(self, bundle: int, share: float) -> dict[str, object]:
        """Ray options that put an actor on a bundle, with `share` of what it holds."""
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
