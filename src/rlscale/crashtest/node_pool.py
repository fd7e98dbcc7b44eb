"""Nodes of a run under test: kills them, and starts a new one for each."""

import json
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from rlscale.crashtest.namespaces import Node
from rlscale.crashtest.ray_nodes import RayNodes
from rlscale.crashtest.victims import MARK


class NodePool:
    """Nodes next to the head node, where the driver runs and which is never killed.

    Args:
        num_slots: units of the resource that stands for a GPU, on each node.
        delay_s: shortest and longest time from the death of a node to the start of its replacement.
        rng: draws the nodes and the delays.
    """

    def __init__(
        self, nodes: RayNodes, *, num_nodes: int, num_slots: int, delay_s: tuple[float, float], rng: random.Random
    ) -> None:
        self._nodes, self._num_slots, self._delay_s, self._rng = nodes, num_slots, delay_s, rng
        nodes.start_head(num_slots=0)
        self._pool = [nodes.add(num_slots=num_slots) for _ in range(num_nodes)]
        self._due_at_s: list[float] = []

    @property
    def overrides(self) -> list[str]:
        """Overrides that let a run use these nodes."""
        return [f"cluster.ray_address={self._nodes.address}"]

    def start_driver(
        self, command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Starts a driver on the head node. Its actors get the mark of the driver, too.

        A run does not start with too few slots, so that all nodes join first.
        """
        self._due_at_s = [0.0] * len(self._due_at_s)
        self.start_due()
        for node in self._pool:
            self._nodes.wait_joined(node)
        given = {**self._nodes.env, **env}
        if MARK in env:
            # Workers of a running Ray inherit its environment; the job config sets theirs.
            marked = {"runtime_env": {"env_vars": {MARK: env[MARK]}}}
            given["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(marked)
        return self._nodes.head.start(command, env=given, output=output)

    def kill_one(self) -> str | None:
        """Kills a node that has joined Ray, and returns its name; None: there is none at the moment."""
        joined = [node for node in self._pool if self._nodes.has_joined(node)]
        if not joined:
            return None
        node: Node = self._rng.choice(joined)
        node.kill()
        self._pool.remove(node)
        self._due_at_s.append(time.monotonic() + self._rng.uniform(*self._delay_s))
        return node.name

    def start_due(self) -> None:
        """Starts the nodes that are due. Call it often, from the main thread, with which nodes end."""
        due = [at_s for at_s in self._due_at_s if at_s <= time.monotonic()]
        for at_s in due:
            self._due_at_s.remove(at_s)
            self._pool.append(self._nodes.add(num_slots=self._num_slots, waits=False))
