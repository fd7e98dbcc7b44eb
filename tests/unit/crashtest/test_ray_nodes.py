"""Starts of Ray on a node that exceed Ray's own time limit."""

from pathlib import Path
from typing import Any, cast

import pytest

from rlscale.crashtest.namespaces import NodesError
from rlscale.crashtest.ray_nodes import STARTED, STARTS, TOO_SLOW, RayNodes


class FakeNode:
    name, is_alive = "node1", True

    def kill(self) -> None:
        self.is_alive = False


class ScriptedNodes(RayNodes):
    """Each start of Ray ends at once and leaves the next output."""

    def __init__(self, folder: Path, outputs: list[str]) -> None:
        super().__init__(folder)
        self.outputs = outputs

    def _start_ray(self, node: Any) -> None:
        self._log(node).write_text(self.outputs.pop(0))
        self._processes[node.name] = cast(Any, self)

    def poll(self) -> int:
        """The exit code of a start, of which this object is the process, too."""
        return 1


def start(folder: Path, *outputs: str) -> tuple[ScriptedNodes, FakeNode]:
    nodes, node = ScriptedNodes(folder, list(outputs)), FakeNode()
    nodes._start_ray(node)
    return nodes, node


def test_a_start_that_is_too_slow_is_repeated(tmp_path: Path) -> None:
    nodes, node = start(tmp_path, f"the node {TOO_SLOW}", STARTED)
    nodes.wait_joined(cast(Any, node))
    assert node.is_alive and not nodes.outputs


@pytest.mark.parametrize(("outputs", "num_left"), [([TOO_SLOW] * (STARTS + 1), 1), (["no such address", STARTED], 1)])
def test_other_failures_and_too_many_are_raised(tmp_path: Path, outputs: list[str], num_left: int) -> None:
    nodes, node = start(tmp_path, *outputs)
    with pytest.raises(NodesError, match=f"Ray did not start on node1:\n{outputs[0]}"):
        nodes.wait_joined(cast(Any, node))
    assert not node.is_alive and len(nodes.outputs) == num_left
