"""Runs on a real SGLang server, and through a real router."""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from rlscale.config.passthrough.sglang_python import find_python, foreign_environment
from tests.integration.conftest import Command
from tests.integration.test_faults import GONE_WITHIN_S, wait_for_training, wait_until

pytestmark = pytest.mark.own_ray

FOREVER = ("data.num_rollout=100000", "eval.interval=null")
TWO_ENGINES = ("cluster.rollout_num_gpus=2", "cluster.num_gpus_per_node=3")


def descendants(command: Command) -> set[int]:
    """The marked processes and their descendants. Children of SGLang overwrite their environment and lose the mark."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            continue  # it ended during the search
        children.setdefault(parent, []).append(int(folder.name))
    found: set[int] = set()
    queue = deque(command.processes())
    while queue:
        pid = queue.popleft()
        if pid not in found:
            found.add(pid)
            queue.extend(children.get(pid, ()))
    return found


def command_line(pid: int) -> str:
    """The command line; empty when the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def test_a_wrong_interpreter_is_refused_before_anything_starts(command: Command) -> None:
    for python, rule in (
        ("/nowhere/python", "must name a Python interpreter that runs, got /nowhere/python"),
        (sys.executable, f"must name an interpreter that has SGLang, got {sys.executable}, which does not"),
    ):
        done = command.run("rollout=sglang", f"sglang.python={python}")
        assert done.code == 2
        assert f"sglang.python {rule}" in done.err and "run bin/install-sglang-cpu" in done.err
        assert not command.run_dir.exists()


RENAME = """
import os
import sys

os.environ.pop("RLSCALE_ENGINE_API_KEY")
from setproctitle import setproctitle

setproctitle("sglang::router")
print(open("/proc/self/cmdline").read().strip("\\0"))
"""


@pytest.mark.slow
def test_a_process_of_sglang_names_itself_whatever_the_order_of_its_environment() -> None:
    # The key is the first variable in a Ray worker whose environment is so ordered; servers remove it at their start.
    environment = foreign_environment({"RLSCALE_ENGINE_API_KEY": "secret", **os.environ})
    done = subprocess.run(
        [str(find_python(None)), "-c", RENAME], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "sglang::router\n"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_servers_behind_a_router_train_and_die_with_the_driver(command: Command) -> None:
    process = command.start("rollout=sglang", *TWO_ENGINES, *FOREVER, "sglang.max_total_tokens=4096")
    wait_for_training(command, process, timeout_s=400)
    alive = descendants(command)
    titles = sorted(command_line(pid).strip()[:60] for pid in alive)
    assert sum("sglang::scheduler" in title for title in titles) == 2, "\n".join(titles)
    assert sum("sglang::router" in title for title in titles) == 1, "\n".join(titles)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(command_line, alive)), GONE_WITHIN_S, "the end of all processes")
    metrics = command.metrics()
    assert [record["weights/version"] for record in metrics] == list(range(1, len(metrics) + 1))
    # Trainer and SGLang agree on the logprobs of SGLang's samples.
    assert all(record["logprob_diff/max"] < 1e-4 for record in metrics)
    for index in range(2):
        log = (command.run_dir / "logs" / f"engine_{index}_server.log").read_text(errors="replace")
        assert "Prefill batch" in log, f"the router sent nothing to engine {index}"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_quickstart_learns_on_it(command: Command, warm: Path) -> None:
    """Trains until the reward has clearly risen; benchmarks/results/sglang_quickstart.md has a complete run."""
    done = command.run("rollout=sglang", f"checkpoint.load={warm}", "eval.stop_reward=0.6", small=False, timeout_s=1700)
    assert done.code == 0, done.err
    finished = json.loads((command.run_dir / "finished.json").read_text())
    assert finished["final_eval"] >= 0.6 > 0.45 > finished["initial_eval"]
    assert max(record["logprob_diff/mean"] for record in command.metrics() if "logprob_diff/mean" in record) < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_dead_router_ends_the_run_and_is_named(command: Command) -> None:
    process = command.start("router.enabled=true", *TWO_ENGINES, *FOREVER)
    wait_for_training(command, process)
    pid = next(pid for pid in descendants(command) if "sglang::router" in command_line(pid))
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=GONE_WITHIN_S)
    assert process.returncode == 1
    assert any("the run failed" in line and "router" in line for line in err.splitlines()), err
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_engine_behind_a_router_is_restarted(command: Command) -> None:
    process = command.start("router.enabled=true", "fault_tolerance.enabled=true", *TWO_ENGINES, *FOREVER)
    wait_for_training(command, process)
    victim = next(pid for pid, words in command.processes().items() if "rlscale.cli.serve" in words)
    before = len(command.metrics())
    os.kill(victim, signal.SIGKILL)

    def resumes() -> bool:
        assert process.poll() is None, process.communicate()[1]
        servers = [pid for pid, words in command.processes().items() if "rlscale.cli.serve" in words]
        return victim not in servers and len(servers) == 2 and len(command.metrics()) > before + 3

    wait_until(resumes, 120, "resuming with a new engine")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
