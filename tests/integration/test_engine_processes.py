"""Runs with engines of several processes, of which one is killed, and engines that release their memory."""

import os
import signal
from pathlib import Path

import pytest

from tests.fake_sglang import install_fake_sglang, records
from tests.integration.conftest import Command
from tests.integration.test_faults import wait_for_training

pytestmark = pytest.mark.own_ray

PROCESSES = ("engine 0", "engine 0 node 1", "engine 1", "engine 1 node 1")
TWO_OF_TWO = (
    "rollout=sglang",
    "router.enabled=false",
    "cluster.rollout_num_gpus=4",
    "cluster.rollout_num_gpus_per_engine=2",
    "model.num_key_value_heads=2",  # SGLang pads one head for two ranks, which is refused on a CPU
    "cluster.num_gpus_per_node=1",
    "eval.interval=null",
)


@pytest.fixture
def python(tmp_path: Path) -> str:
    return f"sglang.python={install_fake_sglang(tmp_path / 'interpreter')}"


@pytest.mark.nightly
def test_an_engine_whose_second_process_dies_is_restarted_with_all_its_processes(command: Command, python: str) -> None:
    process = command.start(*TWO_OF_TWO, python, "data.num_rollout=150", "fault_tolerance.enabled=true")
    wait_for_training(command, process)
    logs = command.run_dir / "logs"
    first = {name: records(logs, name, "launches")[-1] for name in PROCESSES}
    os.kill(first["engine 0 node 1"]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "engine 0: engine 0 node 1 ended with status -9" in out and "restarting engine 0" in out
    assert [len(records(logs, name, "launches")) for name in PROCESSES] == [2, 2, 1, 1]
    for name in PROCESSES:
        assert (logs / f"{name.replace(' ', '_')}_server.log").exists()
    assert command.processes() == {}
    # Every process of an engine got the same weights as all others, to the last.
    last = [records(logs, name, "weights")[-1] for name in PROCESSES]
    assert last == [last[0]] * 4 and last[0]["checksums"]


@pytest.mark.nightly
def test_separate_engines_release_their_memory_while_the_trainer_works(command: Command, python: str) -> None:
    keys = ("rollout=sglang", "cluster.offload_rollout=true", "eval.interval=null")
    done = command.run(*keys, python)
    assert done.code == 0, done.err
    calls = records(command.run_dir / "logs", "engine 0", "calls")
    memory = [
        (call["path"].split("_")[0].strip("/"), call["body"].get("tags"))
        for call in calls
        if call["path"].endswith("memory_occupation")
    ]
    assert memory[0][0] == "release"
    # Weights return before they are sent, the cache after it.
    assert [name for name, _ in memory] == ["release", "resume", "resume"] * (len(memory) // 3) and len(memory) >= 9
    assert [tags for name, tags in memory if name == "resume"][:2] == [["weights"], ["kv_cache"]]
