"""Runs on several raylets of one machine: several nodes for Ray, one for the kernel."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from rlscale.crashtest.compare import check_samples
from rlscale.engines.launch import API_KEY_VARIABLE
from tests.integration.conftest import REWARDED, Command, command

__all__ = ["command"]

NODE: dict[str, Any] = {
    "num_cpus": 4,
    "num_gpus": 0,
    "resources": {"rlscale_slot": 1},
    "object_store_memory": 200 * 2**20,
}
START_TIMEOUT_S = 200.0
DRAIN = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test", "--deadline-remaining-seconds", "600")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A Ray of one raylet with one slot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            yield cluster
        finally:
            cluster.shutdown()


def wait_for(text: str, process: "subprocess.Popen[str]", lines: list[str]) -> str:
    """The first line of a run's output that contains `text`; reads on to it."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"the run ended without {text!r}:\n{''.join(lines)}")


@contextlib.contextmanager
def output_at_failure(command: Command, process: "subprocess.Popen[str]", lines: list[str]) -> Iterator[None]:
    """Adds what a run printed and logged to the error of the block."""
    try:
        yield
    except BaseException as error:
        state = command.describe()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)  # a run that is failing by itself says why
        process.terminate()
        rest, errors = process.communicate(timeout=60)
        error.add_note(f"The run printed:\n{''.join(lines)[-3000:]}{rest[-3000:]}\n{errors[-3000:]}\n{state}")
        raise


@pytest.mark.nightly
@pytest.mark.own_ray
def test_two_trainers_and_an_engine_run_on_three_raylets(command: Command, cluster: Cluster) -> None:
    for _ in range(2):
        cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    command.ray = cluster.address
    done = command.run(REWARDED, "cluster.actor_num_gpus_per_node=2", f"cluster.ray_address={cluster.address}")
    assert done.code == 0, done.err
    assert command.metrics()[-1]["step"] == 3
    rows = [line.partition("] ")[2] for line in done.out.splitlines()]
    assert sum(row.startswith(f"{os.uname().nodename} ") for row in rows) == 3


@pytest.mark.slow
@pytest.mark.own_ray
def test_an_engine_joins_with_a_raylet_and_leaves_with_it(command: Command, cluster: Cluster) -> None:
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    command.ray = cluster.address
    places = ("fault_tolerance.enabled=true", "cluster.rollout_max_num_gpus=2", "data.num_rollout=1000000")
    dumps = f'debug.save_rollout_data="{command.folder}/samples/{{rollout_id}}.jsonl"'
    run = command.start(REWARDED, *places, dumps, f"cluster.ray_address={cluster.address}", "logging.console=plain")
    lines: list[str] = []
    wait_for("] 2/", run, lines)
    joined = cluster.add_node(**NODE)
    engine = JoinedEngine.from_line(wait_for("engine 1 joins at", run, lines), command)
    with output_at_failure(command, run, lines):
        wait_until(lambda: engine.get("/v1/loads")["loads"][0]["num_running_reqs"] > 0)
    # It got requests after its first weights: those of a rollout that has been trained on.
    assert int(engine.get("/model_info")["weight_version"]) >= 2
    drain = ["drain-node", "--address", cluster.address, "--node-id", joined.node_id, *DRAIN]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], check=True, capture_output=True)
    wait_for("engine 1 leaves with its node", run, lines)
    num_before = len(command.metrics())
    wait_until(lambda: len(command.metrics()) > num_before + 3)
    wait_until(engine.has_ended)
    run.terminate()
    run.communicate(timeout=60)
    samples = command.folder / "samples"
    # The run may have been writing the newest file.
    rollouts = [file for file in samples.iterdir() if file.stem.isdigit()]  # the others are of evaluations
    max(rollouts, key=lambda file: int(file.stem)).unlink()
    assert check_samples(samples, num_groups=4, max_staleness=0) == []


@dataclass(frozen=True, kw_only=True)
class JoinedEngine:
    """The server of an engine that joined a run."""

    url: str
    process: Path  # its folder in /proc
    key: str

    @classmethod
    def from_line(cls, line: str, command: Command) -> "JoinedEngine":
        url = line.split()[-1]
        flag = f"--port={url.rpartition(':')[2]}"
        (pid,) = [pid for pid, words in command.processes().items() if flag in words]
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        (key,) = [each.partition("=")[2] for each in variables if each.startswith(f"{API_KEY_VARIABLE}=")]
        return cls(url=url, process=Path(f"/proc/{pid}"), key=key)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def has_ended(self) -> bool:
        return not self.process.exists()


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
