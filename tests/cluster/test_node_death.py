"""A node dies during a run: other nodes replace it, or the run ends and names it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.crashtest.namespaces import Node
from rlscale.crashtest.ray_nodes import RayNodes
from tests.cluster.conftest import NEEDS_NAMESPACES, TWO_NODES, ClusterRun
from tests.integration.conftest import REWARDED
from tests.integration.test_crash import run_crashtest

pytestmark = NEEDS_NAMESPACES

TOLERANT = ("fault_tolerance.enabled=true", "checkpoint.save_interval=1", "data.num_rollout=6")
START_TIMEOUT_S = 280.0

HELD_REWARD = """
import pathlib, time

def reward(sample):
    while pathlib.Path(FOLDER, "hold").exists():
        pathlib.Path(FOLDER, "held").touch()
        time.sleep(0.02)
    return len(sample.response) % 3
"""
"""A reward that is not given while there is a file `hold`."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    """A head node for the driver alone."""
    with RayNodes(tmp_path / "ray") as nodes:
        nodes.start_head(num_slots=0)
        yield nodes


@pytest.fixture
def run(nodes: RayNodes, tmp_path: Path, cache: Path) -> ClusterRun:
    return ClusterRun(nodes=nodes, folder=tmp_path, cache=cache, run_dir=tmp_path / "run")


def steps(run: ClusterRun) -> list[int]:
    """The steps of the records of training, without evaluations."""
    file = run.run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [record["step"] for record in records if "train/loss" in record]


def wait_for_step(run: ClusterRun, step: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while step not in steps(run):
        assert time.monotonic() < deadline_s, run.output
        time.sleep(0.1)


def wait_until_held(run: ClusterRun) -> None:
    """Waits until `HELD_REWARD` holds a rollout."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not (run.folder / "held").exists():
        assert time.monotonic() < deadline_s, run.output
        time.sleep(0.02)


def wait_for_line(run: ClusterRun, text: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while text not in run.output:
        assert time.monotonic() < deadline_s, run.output
        time.sleep(0.1)


def has_trainer(run: ClusterRun, node: Node) -> bool:
    """Whether a trainer rank runs on a node."""
    return "PolicyActor" in node.run(["ps", "axww"]).stdout


@pytest.mark.slow
def test_a_node_that_joins_replaces_one_with_a_trainer_and_an_engine(run: ClusterRun, nodes: RayNodes) -> None:
    nodes.add(num_slots=1)
    victim = nodes.add(num_slots=1)
    process = run.start(*TWO_NODES, *TOLERANT)
    wait_for_step(run, 1)
    victim.kill()
    joined = nodes.add(num_slots=1)
    assert process.wait(300) == 0, run.output
    assert steps(run) == list(range(6))
    name = f"{victim.name} ({victim.address})"
    assert f"its node {name}, id " in run.output and "restarting the trainers from the last checkpoint" in run.output
    assert f"{joined.name} ({joined.address}) joins the run" in run.output


@pytest.mark.nightly
def test_a_node_that_dies_while_it_is_checked_is_replaced(run: ClusterRun, nodes: RayNodes) -> None:
    nodes.add(num_slots=1)
    victim = nodes.add(num_slots=1)
    process = run.start(*TWO_NODES, *TOLERANT)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while "NodeProbe" not in victim.run(["ps", "axww"]).stdout:
        assert time.monotonic() < deadline_s, run.output
        time.sleep(0.02)
    victim.kill()
    nodes.add(num_slots=1)
    assert process.wait(300) == 0, run.output
    assert steps(run) == list(range(6))
    assert "restarting the check of the nodes (restart 1 of at most" in run.output


@pytest.mark.nightly
@pytest.mark.parametrize("during", ["a weight sync", "a rollout"])
def test_remaining_nodes_replace_an_engine(run: ClusterRun, nodes: RayNodes, during: str) -> None:
    (run.folder / "held_reward.py").write_text(HELD_REWARD.replace("FOLDER", repr(str(run.folder))))
    # Bundles of one rank and two engines; the node with the rank has room for all of them later.
    places = ("cluster.rollout_num_gpus=2", "data.num_rollout=12", "reward.custom_path=held_reward:reward")
    first, second = nodes.add(num_slots=2), nodes.add(num_slots=1)
    process = run.start(*TOLERANT, *places, folder=run.folder)
    wait_for_step(run, 1)
    (run.folder / "hold").touch()
    wait_until_held(run)
    victim = next(node for node in (first, second) if not has_trainer(run, node))
    nodes.add(num_slots=2)
    victim.kill(silently=True)
    # The engine's requests are answered: held until Ray has noticed the loss, or not, so that the next sync notices it.
    if during == "a rollout":
        wait_for_line(run, "restarting engine")
    (run.folder / "hold").unlink()
    assert process.wait(300) == 0, run.output
    assert steps(run) == list(range(12))
    assert "restarting engine" in run.output and "restarting the trainers" not in run.output


@pytest.mark.nightly
def test_without_a_replacement_the_run_ends_and_names_the_node(run: ClusterRun, nodes: RayNodes) -> None:
    nodes.add(num_slots=1)
    victim = nodes.add(num_slots=1)
    process = run.start(*TWO_NODES, *TOLERANT, "data.num_rollout=200", "fault_tolerance.wait_for_nodes_s=2")
    wait_for_step(run, 1)
    victim.kill()
    assert process.wait(120) == 1, run.output
    *_, last = [line for line in run.output.splitlines() if "the run failed" in line]
    assert f"node {victim.name} ({victim.address}): died, and no other node provided its 1 rlscale_slots" in last
    assert "fault_tolerance.wait_for_nodes_s=2" in last


@pytest.mark.nightly
def test_without_fault_tolerance_the_run_ends_and_names_the_node(run: ClusterRun, nodes: RayNodes) -> None:
    nodes.add(num_slots=1)
    victim = nodes.add(num_slots=1)
    process = run.start(*TWO_NODES, "data.num_rollout=200")
    wait_for_step(run, 1)
    victim.kill()
    assert process.wait(120) == 1, run.output
    assert f"its node {victim.name} ({victim.address}), id " in run.output


@pytest.mark.nightly
def test_three_kills_of_nodes_repeat_to_the_bit(tmp_path: Path, cache: Path) -> None:
    """benchmarks/results/crashtest_quickstart_nodes.md has the report of twenty."""
    steps = ("data.num_rollout=40", REWARDED)
    report = run_crashtest(tmp_path, cache, *TWO_NODES, *steps, num_kills=3, victims=("node",), num_nodes=2)
    assert report["differences"] == []
    assert report["sample_faults"] == []
    assert [kill["victim"] for kill in report["outcome"]["kills"]] == ["node"] * 3
    assert report["outcome"]["num_starts"] == 1, "the driver keeps running"
