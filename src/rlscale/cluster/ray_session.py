"""Ray session of a run, started or attached, and the placement group inside it."""

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlscale.cluster.attach import attach, running_cluster
from rlscale.cluster.cluster_address import cluster_address
from rlscale.cluster.process_reaper import reaped_session
from rlscale.cluster.ray_daemons import needed_daemons
from rlscale.cluster.ray_end import REMOVE_GROUPS, call_ray_or_leave, end_ray
from rlscale.cluster.ray_token import create_token
from rlscale.config import ClusterConfig, Device
from rlscale.config.groups.cluster import LOCAL_RAY
from rlscale.control.signals import interrupt_on_ending_signals
from rlscale.errors import ConfigError, Problem, WorkerError
from rlscale.plan.placement import Layout, check_node_sizes, order_bundles, reorder_bundles

SLOT = "rlscale_slot"
"""Custom resource that replaces a GPU on a machine without GPUs; the run creates as many as it needs."""

SIMULATED_GPUS = "rlscale_simulated_gpus"
"""Custom resource of nodes whose GPUs do not exist."""

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
def ray_session(config: ClusterConfig, layout: Layout, *, may_spin: bool = True) -> Iterator["RaySession"]:
    """Ray for the duration of a run. A session that already exists is used and left running.

    Ray starts in the background, while the caller reads its data: call `wait` before the first use.

    Args:
        may_spin: False: threads never spin, whatever `cluster.spin_threads` is.
    """
    if ray.is_initialized():
        yield RaySession(config, layout, started=None)
        return
    if threading.current_thread() is threading.main_thread():
        interrupt_on_ending_signals()
        # Schedulers send SIGUSR1, too, which saves a checkpoint once there are trainers (control/signals.py).
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with (
        reaped_session(),
        environment(variables := worker_env(config, may_spin=may_spin)),
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray") as background,
    ):
        started = background.submit(_start, config, layout, variables)
        try:
            yield RaySession(config, layout, started=started)
        finally:
            wait([started])
            end_ray()


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


def _start(config: ClusterConfig, layout: Layout, variables: Mapping[str, str]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this Ray hides the GPUs from actors that claim none, and warns that it will stop doing so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    cluster = cluster_address(config.ray_address)
    if cluster is not None:
        attach(cluster, {**options, "runtime_env": {"env_vars": dict(variables)}})
        return
    # Actors claim slots or GPUs, never CPUs: a laptop with two cores runs any number of small ranks.
    options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, layout.num_gpus)}
    if config.device == Device.cpu:
        options |= {"resources": {SLOT: layout.num_gpus}, "num_gpus": 0}
    _report_running_cluster(config)
    create_token()
    _start_local(options)


def _report_running_cluster(config: ClusterConfig) -> None:
    """Warns of a Ray cluster on this machine that the run does not use, unless the config asks for a separate Ray."""
    if config.ray_address is not None or (found := running_cluster()) is None:
        return
    _logger.warning(
        "a Ray cluster runs on this machine at %s; this run starts a separate Ray. To use the cluster, set "
        "cluster.ray_address=auto; cluster.ray_address=local removes this warning",
        found,
    )


def _start_local(options: Mapping[str, Any]) -> None:
    """Starts Ray on this machine, again if it exceeds Ray's own time limit, which cannot be set.

    The reaper ends the processes of a failed attempt.

    Raises:
        WorkerError: every attempt was too slow.
    """
    for attempt in range(1, LOCAL_STARTS + 1):
        try:
            # Without an address Ray would connect to a cluster that runs on this machine.
            with needed_daemons():
                ray.init(address=LOCAL_RAY, **options)
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


def worker_env(config: ClusterConfig, *, may_spin: bool = True) -> Mapping[str, str]:
    """Environment of every actor and engine: how OpenMP's threads wait for each other."""
    spins = may_spin and config.spin_threads and config.device == Device.cpu
    return SPIN_OMP_ENV if spins else PASSIVE_OMP_ENV


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
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
    # Nodes of a rehearsal have GPUs that do not exist, so that actors are placed as in the real run.
    if config.device == Device.cuda or SIMULATED_GPUS in _cluster_resources():
        return "GPU"
    # A cluster that was started elsewhere has no slots; there one CPU replaces a GPU.
    return SLOT if SLOT in _cluster_resources() else "CPU"


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _node_sizes(resource: str) -> list[int]:
    """Units of the resource on each living node that has some."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    sizes = [int(node["Resources"].get(resource, 0)) for node in nodes if node["Alive"]]
    return [size for size in sizes if size]


def _check_capacity(config: ClusterConfig, layout: Layout) -> None:
    resource = bundle_resource(config)
    problems = _capacity_problems(layout, resource, int(_cluster_resources().get(resource, 0)))
    if problems := problems or check_node_sizes(layout, _node_sizes(resource)):
        raise ConfigError(problems)


def check_local_gpus(layout: Layout) -> list[Problem]:
    """Problem of too few GPUs for a Ray that starts on this machine, by Ray's own detection; Ray is not started."""
    if ray.is_initialized():
        return []  # it may have more GPUs than this machine
    available = _count_gpus()
    if available is None:
        return []
    return _capacity_problems(layout, "GPU", available) or check_node_sizes(layout, [available])


def _count_gpus() -> int | None:
    """GPUs that Ray would find on this machine; None: this version of Ray detects them in another way."""
    try:
        from ray._private.accelerators import get_accelerator_manager_for_resource  # private, so its place may change
    except ImportError:
        return None
    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        return None
    visible = manager.get_current_process_visible_accelerator_ids()
    number = int(manager.get_current_node_num_accelerators())
    return number if visible is None else min(number, len(visible))


def _capacity_problems(layout: Layout, resource: str, available: int) -> list[Problem]:
    if available >= layout.num_gpus:
        return []
    on_gpus = resource == "GPU"
    fix = (
        "add +on=cpu to run a small version of the experiment here, or set cluster.ray_address to a cluster that has "
        "them"
        if on_gpus
        else "request fewer ranks and engines, or a larger cluster"
    )
    split = f"{layout.num_trainers} for training, {layout.num_engine_gpus} for generation"
    shared = ", shared" if layout.colocate else ""
    shared += f", {layout.num_critics} for the critic" if layout.num_critics else ""
    num_judge = layout.num_reward_engines * layout.gpus_per_reward_engine
    shared += f", {num_judge} for reward.engine" if num_judge else ""
    shared += "".join(f", {each.num_engines * each.gpus_per_engine} for {each.name}" for each in layout.frozen)
    return [
        Problem(
            path="cluster",
            rule=f"fit on the {'GPUs' if on_gpus else resource + 's'} that Ray has",
            value=f"{layout.num_gpus} required ({split}{shared}) and {available} available",
            fix=fix,
        )
    ]


def node_names(node_ids: Sequence[str]) -> list[str]:
    """Names of living and dead nodes for messages: host and address."""
    nodes = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in _all_nodes()}
    return [nodes.get(node, node) for node in node_ids]


def living_nodes() -> dict[str, dict[str, Any]]:
    """Ray's records of the nodes that live, by id."""
    return {node["NodeID"]: node for node in _all_nodes() if node["Alive"]}


def _all_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def driver_node() -> str:
    """Ray's id of the node of this process."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


@contextmanager
def placement_group_for(config: ClusterConfig, layout: Layout) -> Iterator["Bundles"]:
    """The placement group of a run, removed at the end.

    Raises:
        ConfigError: the GPUs of an engine are not on one node.
    """
    resource = bundle_resource(config)
    if layout.num_bundles == 0:
        yield Bundles(None, resource, layout)
        return
    group = placement_group(bundle_requests(layout, resource), strategy="PACK")
    try:
        if not group.wait(timeout_seconds=PLACEMENT_TIMEOUT_S):
            raise RuntimeError(
                f"Ray did not place {_bundle_counts(layout, resource)} within {PLACEMENT_TIMEOUT_S:.0f} s; another run "
                "on this cluster may use them (see `ray status`), or no node has the largest number free"
            )
        yield Bundles(group, resource, layout)
    finally:
        call_ray_or_leave(partial(remove_placement_group, group), REMOVE_GROUPS)


def bundle_requests(layout: Layout, resource: str) -> list[dict[str, float]]:
    """Resources of each bundle of a placement group."""
    with_cpu = {"CPU": 1.0} if resource == "GPU" else {}
    return [{resource: float(size)} | with_cpu for size in layout.bundle_sizes]


def _bundle_counts(layout: Layout, resource: str) -> str:
    """Bundles by size, e.g. `2 bundles of 8 GPU and 8 bundles of 1 GPU`."""
    counts = Counter(layout.bundle_sizes)
    return " and ".join(f"{counts[size]} bundles of {size} {resource}" for size in sorted(counts, reverse=True))


class Bundles:
    """Bundles of a placement group in the order of the layout. Ranks of one node are consecutive."""

    def __init__(self, group: PlacementGroup | None, resource: str, layout: Layout) -> None:
        """Args:
        group: None: a run with only the driver, without trainers and with external engines.

        Raises:
            ConfigError: see `order_bundles`.
        """
        self.group, self.resource, self.sizes, self._layout = group, resource, layout.bundle_sizes, layout
        self._nodes = self._find_nodes()
        self._ordered_on = self._placed_nodes(self._nodes)
        # A bundle keeps its rank or engine until its node dies.
        self._order = () if group is None else order_bundles(layout, self._ordered_on)
        self._reordering = threading.Lock()

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Nodes of the run: that of the driver, which every process must reach, then those of the bundles."""
        if self.group is None:
            return ()
        return tuple(dict.fromkeys([driver_node(), *(self._nodes[bundle] for bundle in self._order)]))

    @property
    def num_nodes(self) -> int:
        return len(self.node_ids) or 1

    @property
    def engine_nodes(self) -> frozenset[str]:
        """Nodes with a process of an engine of the policy."""
        engines = range(self._layout.num_engines)
        processes = [each for engine in engines for each in self._layout.process_bundles(engine)]
        return frozenset(self._nodes[placed] for bundles in processes for placed in self.placed(bundles))

    def count_nodes(self, num_bundles: int) -> int:
        """Nodes of the first `num_bundles` bundles."""
        return len({self._nodes[bundle] for bundle in self._order[:num_bundles]}) or 1

    def find_unplaced(self) -> list[int]:
        """Bundles that have no living node now."""
        if self.group is None:
            return []
        now, alive = self._find_nodes(), living_nodes()
        return [bundle for bundle in self._order if now.get(bundle) not in alive]

    def find_lost_nodes(self) -> list[str]:
        """Names of the nodes that had bundles and have died."""
        return node_names(sorted(set(self._nodes.values()) - living_nodes().keys()))

    def accept_nodes(self) -> list[str]:
        """Names of the nodes to which Ray has moved bundles since the last call; they belong to the run from now on."""
        self.reorder()
        before, self._nodes = set(self._nodes.values()), self._find_nodes()
        new = sorted(set(self._nodes.values()) - before)
        return node_names(new) if new else []

    def reorder(self) -> bool:
        """Gives bundles that Ray has moved to other nodes to ranks and engines again; False while some have no node.

        Raises WorkerError when the GPUs of a process of an engine cannot be on one node.
        """
        if self.group is None:
            return True
        with self._reordering:
            nodes, alive = self._find_nodes(), living_nodes()
            if any(nodes.get(placed) not in alive for placed in self._order):
                return False
            now = self._placed_nodes(nodes)
            order = reorder_bundles(self._layout, self._order, self._ordered_on, now)
            if order is None:
                raise self._split_processes(now)
            self._order, self._ordered_on = order, now
        return True

    def placed(self, bundles: Sequence[int]) -> tuple[int, ...]:
        """Ray's indices of bundles of the layout. They change when a node dies."""
        return tuple(self._order[bundle] for bundle in bundles)

    def _split_processes(self, now: Sequence[str]) -> WorkerError:
        """The error of nodes whose GPUs do not make up processes of engines."""
        moved = Counter(now[placed] for placed in self._order if now[placed] != self._ordered_on[placed])
        shares = ", ".join(
            f"{moved[node]} of {name}" for node, name in zip(moved, node_names(list(moved)), strict=True)
        )
        engines = range(self._layout.num_engines)
        sizes = " or ".join(map(str, sorted({self._layout.process_gpus(engine) for engine in engines})))
        return WorkerError(
            "the engines",
            f"need {sizes} {self.resource}s of one node for each process, and Ray has replaced "
            f"those of the dead node by {shares}; run again when whole nodes are free (see `ray status`)",
        )

    @staticmethod
    def _placed_nodes(nodes: Mapping[int, str]) -> list[str]:
        return [nodes[placed] for placed in range(len(nodes))]

    def _find_nodes(self) -> dict[int, str]:
        """Ray's id of the node of each bundle."""
        nodes: dict[int, str] = {} if self.group is None else placement_group_table(self.group)["bundles_to_node_id"]
        return nodes

    def options(self, bundle: int, share: float) -> dict[str, object]:
        """Ray options that place an actor or a task on a bundle, with `share` of its resource."""
        claim: dict[str, object] = {"num_cpus": 0}
        amount = share * self.sizes[bundle]
        if self.resource == "GPU":
            claim["num_gpus"] = amount
        elif self.resource == "CPU":
            claim["num_cpus"] = amount
        else:
            claim["resources"] = {self.resource: amount}
        assert self.group is not None, "there is no bundle"
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self._order[bundle]
        )
        return {**claim, "scheduling_strategy": strategy}

    def actor_options(self, bundle: int, share: float) -> dict[str, object]:
        """Ray options of an actor on a bundle. Ray does not restart it: the run does."""
        return {**self.options(bundle, share), "max_restarts": 0, "max_task_retries": 0}
