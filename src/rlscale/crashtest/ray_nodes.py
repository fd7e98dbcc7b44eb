"""A Ray cluster over the nodes of a virtual network. Without GPUs: each node has slots instead."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rlscale.cluster.ray_session import SLOT
from rlscale.crashtest.namespaces import Network, Node, NodesError

PORT = 6379
START_TIMEOUT_S = 240.0
POLL_S = 0.05
STARTED = "Ray runtime started"
STARTS = 3
TOO_SLOW = "timed out during startup"  # Ray's own limit of 30 s, which cannot be set
NUM_CPUS = 8
OBJECT_STORE_BYTES = 300 * 2**20

FAST_DETECTION: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""Environment in which Ray notices the loss of a node within seconds instead of half a minute."""

_ENV: Mapping[str, str] = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **FAST_DETECTION}


class RayNodes:
    """A head node, where drivers run, and nodes that join it.

    Args:
        folder: of the output of `ray start` on each node.
        env: additional environment of Ray and its workers.

    Example:
        with RayNodes(folder) as nodes:
            nodes.add(num_slots=1)
            done = nodes.head.run(["rlscale-train", f"cluster.ray_address={nodes.address}"], env=nodes.env)
    """

    def __init__(self, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        self._folder, self.env = folder, {**_ENV, **(env or {})}
        self._network = Network()
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # The same short path on every node, because paths of sockets must be short; the content is private.
        self._temp = tempfile.TemporaryDirectory(prefix="ray-")
        self.head: Node

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    @property
    def nodes(self) -> list[Node]:
        """All nodes, the head node first; dead ones, too."""
        return self._network.nodes

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._network.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.__exit__(kind, error, trace)
        self._temp.cleanup()

    def start_head(self, *, num_slots: int) -> Node:
        """Starts the first node."""
        self.head = self._begin("--head", f"--port={PORT}", "--include-dashboard=false", num_slots=num_slots)
        return self.head

    def add(self, *, num_slots: int, private: tuple[Path, ...] = (), waits: bool = True) -> Node:
        """Starts a node that joins the cluster.

        Args:
            private: folders that this node does not share with the others.
            waits: until it has joined.
        """
        return self._begin(f"--address={self.address}", num_slots=num_slots, private=private, waits=waits)

    def has_joined(self, node: Node) -> bool:
        """Whether Ray runs on a living node."""
        return node.is_alive and STARTED in self._log(node).read_text()

    def wait_joined(self, node: Node) -> None:
        """Waits until Ray runs on a node; starts it again where the machine is too busy for Ray's own time limit.

        Raises NodesError with its output when it does not start.
        """
        deadline_s, num_starts = time.monotonic() + START_TIMEOUT_S, 1
        while not self.has_joined(node):
            has_ended = self._processes[node.name].poll() is not None
            if has_ended and num_starts < STARTS and TOO_SLOW in self._log(node).read_text():
                self._start_ray(node)
                num_starts += 1
            elif has_ended or time.monotonic() > deadline_s:
                node.kill()
                raise NodesError(f"Ray did not start on {node.name}:\n{self._log(node).read_text()}")
            time.sleep(POLL_S)

    def _log(self, node: Node) -> Path:
        return self._folder / f"ray_{node.name}.log"

    def _begin(self, *options: str, num_slots: int, private: tuple[Path, ...] = (), waits: bool = True) -> Node:
        temp = Path(self._temp.name)
        node = self._network.add_node(private=(temp, *private))
        resources = json.dumps({SLOT: num_slots} if num_slots else {})
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block", f"--num-cpus={NUM_CPUS}"]
        command += ["--num-gpus=0", f"--resources={resources}", f"--node-ip-address={node.address}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += [f"--temp-dir={temp}"] if "--head" in options else []
        self._commands[node.name] = command
        self._start_ray(node)
        if waits:
            self.wait_joined(node)
        return node

    def _start_ray(self, node: Node) -> None:
        with self._log(node).open("w") as output:
            self._processes[node.name] = node.start(self._commands[node.name], output=output, env=self.env)
