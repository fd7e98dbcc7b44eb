"""Actors that examine each node of a run before anything else starts there. They import no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlscale.cluster.node_network import find_interface, interfaces, node_address
from rlscale.cluster.ray_calls import node_death
from rlscale.cluster.ray_session import living_nodes, node_names
from rlscale.config.passthrough.sglang_python import find_python, installed_packages
from rlscale.engines.ports import free_port, port_fault
from rlscale.errors import ConfigError, Problem, WorkerError
from rlscale.plan.node_facts import PRESENT, CheckedFolder, FixedPort, FolderUse, NodeFacts, token_file
from rlscale.training.listener import listen

PROBE_TIMEOUT_S = 60.0
DEATH_KNOWN_AFTER_S = 30.0  # about the time in which Ray notices a node that is silent
CONNECT_TIMEOUT_S = 5.0
VISIBLE_AFTER_S = 3.0  # a shared file system may show a new file late
POLL_S = 0.2
NUM_CLOCK_READINGS = 3
MAX_CONNECTING = 32
SOURCES = Path(__file__).parents[1]
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest:
    """The same for all nodes.

    Args:
        env_vars: of the trainers.
        sglang_python: `sglang.python`. None: the default.
        needs_sglang: whether engines are SGLang's.
    """

    folders: tuple[CheckedFolder, ...]
    run_folder: Path
    env_vars: Mapping[str, str]
    sglang_python: str | None = None
    needs_sglang: bool = False


def probe_nodes(
    node_ids: Sequence[str], request: ProbeRequest, ports: Mapping[str, Sequence[FixedPort]]
) -> list[NodeFacts]:
    """The facts of each node, with its connections to the others and its clock.

    Args:
        ports: by node, those that must be free there.

    Raises:
        ConfigError: with every node on which a probe could not run.
        WorkerError: a node died before its facts arrived.
    """
    titles = node_names(node_ids)
    actors = [
        NodeProbe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in node_ids
    ]
    try:
        facts = _get_all(node_ids, [actor.facts.remote(request) for actor in actors])
        taken = _get_all(
            node_ids, [actor.taken.remote(ports.get(node, ())) for node, actor in zip(node_ids, actors, strict=True)]
        )
        places = _get_all(node_ids, [actor.listen.remote() for actor in actors])
        targets = [(title, *place) for title, place in zip(titles, places, strict=True)]
        unreachable = _get_all(node_ids, [actor.connect.remote(targets) for actor in actors])
        clocks = _read_clocks(node_ids, actors)
    finally:
        for actor in actors:
            ray.kill(actor)
    return [
        replace(each, unreachable=failed, taken_ports=used, clock_ahead_s=ahead_s, clock_error_s=error_s)
        for each, failed, used, (ahead_s, error_s) in zip(facts, unreachable, taken, clocks, strict=True)
    ]


def read_folder(folder: CheckedFolder) -> str | None:
    """Content that a node finds in a folder: that of the driver's file, or names and sizes of its files."""
    if folder.use == FolderUse.present:
        return PRESENT if folder.path.exists() else None
    if folder.use == FolderUse.same:
        return list_files(folder.path)
    file = token_file(folder)
    deadline_s = time.monotonic() + VISIBLE_AFTER_S
    while not file.exists():
        if time.monotonic() > deadline_s:
            return None
        time.sleep(POLL_S)
    return file.read_text(encoding="utf-8")


def _read_folders(folders: Sequence[CheckedFolder]) -> dict[str, str | None]:
    # In parallel: each missing folder is waited for.
    with ThreadPoolExecutor() as threads:
        found = threads.map(read_folder, folders)
        return dict(zip((folder.key for folder in folders), found, strict=True))


def list_files(folder: Path) -> str | None:
    """Names and sizes of the files in a folder, without subfolders, or of one file; None: there is neither."""
    if not folder.exists():
        return None
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    return "\n".join(f"{path.name} {path.stat().st_size}" for path in files if path.is_file())


class _NodeProbe:
    """Examines the node on which Ray starts it."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def facts(self, request: ProbeRequest) -> NodeFacts:
        address = node_address()
        return NodeFacts(
            host=socket.gethostname(),
            address=address,
            interface=find_interface(address),
            interfaces=interfaces(),
            chosen_interfaces={
                name: value
                for name in INTERFACE_VARIABLES
                if (value := request.env_vars.get(name, os.environ.get(name))) is not None
            },
            versions=_versions(request),
            folders=_read_folders(request.folders),
            free_memory_bytes=_free_memory_bytes(),
            free_disk_bytes=_free_disk_bytes(request.run_folder),
        )

    def taken(self, ports: Sequence[FixedPort]) -> tuple[FixedPort, ...]:
        """Those of the ports that another process uses."""
        return tuple(each for each in ports if port_fault(each.host or node_address(), each.port) is not None)

    def listen(self) -> tuple[str, int]:
        """Address and port of a socket in the range from which servers of a run take their ports."""
        address = node_address()
        self._listener = listen(address, port=free_port(address))
        return address, int(self._listener.getsockname()[1])

    def connect(self, targets: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
        """The nodes to which no connection can be opened, each with the reason.

        Args:
            targets: (node, address, port).
        """
        with ThreadPoolExecutor(max_workers=MAX_CONNECTING) as threads:
            return tuple(failed for failed in threads.map(_try_connect, targets) if failed is not None)

    def now(self) -> float:
        """The wall clock of the node."""
        return time.time()


NodeProbe: Any = ray.remote(num_cpus=0, max_restarts=0)(_NodeProbe)


def _get_all(node_ids: Sequence[str], refs: Sequence[Any]) -> list[Any]:
    """The results of one call on each node."""
    ray.wait(list(refs), num_returns=len(refs), timeout=PROBE_TIMEOUT_S)
    results, problems = [], []
    for node, ref in zip(node_ids, refs, strict=True):
        try:
            results.append(ray.get(ref, timeout=0))
        except (RayError, TimeoutError) as error:
            (title,) = node_names([node])
            # An error of the probe itself comes from a node that lives.
            if not isinstance(error, RayTaskError) and _is_dead(node):
                raise WorkerError(f"the check of node {title}", node_death(node), died=True) from error
            reason = str(error).strip().splitlines()[-1]
            rule, fix = "run rlscale on every node", "install rlscale there, and see the logs of Ray on that node"
            problems.append(Problem(path="cluster", rule=rule, value=f"{title}, where it fails: {reason}", fix=fix))
    if problems:
        raise ConfigError(problems)
    return results


def _is_dead(node: str) -> bool:
    """Whether a node whose actor is lost has died; Ray may notice that only some seconds later."""
    deadline_s = time.monotonic() + DEATH_KNOWN_AFTER_S
    while node in living_nodes():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _read_clocks(node_ids: Sequence[str], actors: Sequence[Any]) -> list[tuple[float, float]]:
    """For each node: seconds by which its clock is ahead of this one, and the bound of the error."""
    clocks = []
    for node, actor in zip(node_ids, actors, strict=True):
        readings = []
        for _ in range(NUM_CLOCK_READINGS):
            before_s = time.time()
            (there_s,) = _get_all([node], [actor.now.remote()])
            after_s = time.time()
            # The clock was read at an unknown moment between the two.
            readings.append((there_s - (before_s + after_s) / 2, (after_s - before_s) / 2))
        clocks.append(min(readings, key=lambda reading: reading[1]))
    return clocks


def _try_connect(target: tuple[str, str, int]) -> str | None:
    name, address, port = target
    try:
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{name} at port {port}: {error}"
    return None


def _versions(request: ProbeRequest) -> dict[str, str | None]:
    packages = {"torch": "torch", "transformers": "transformers", "Ray": "ray"}
    versions = {"Python": platform.python_version(), **{name: _version(package) for name, package in packages.items()}}
    versions["rlscale"] = f"{_version('rlscale') or 'source'} ({_hash_sources(SOURCES)})"
    if request.needs_sglang:
        versions["SGLang"] = _sglang_version(request.sglang_python)
    return versions


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sglang_version(python: str | None) -> str | None:
    try:
        return installed_packages(find_python(python)).sglang
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _hash_sources(folder: Path) -> str:
    """Hash of the Python files of a package: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _free_memory_bytes() -> int:
    """Memory that processes can still get."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_disk_bytes(folder: Path) -> int:
    """Free bytes of the file system of a folder, which may not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free
