"""The kill runner kills the planned processes, restarts the driver and reports faults."""

import random
import sys
from pathlib import Path

import pytest

from rlscale.crashtest import kill_runner as module
from rlscale.crashtest.kill_runner import KillPlan, KillRunner
from rlscale.crashtest.verdict import Verdict, to_markdown
from rlscale.crashtest.victims import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

DRIVER = """
import json, subprocess, sys, time
from pathlib import Path
metrics, length, behaviour = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def engine():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "rlscale.cli.serve"])
child = engine()
while not metrics.exists() or len(metrics.read_text().splitlines()) < length:
    if child.poll() is not None:
        if behaviour == "fragile":
            sys.exit("the engine died")
        child = engine()
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 0, "time": time.time()}) + "\\n")
    time.sleep(0.05)
child.kill()
child.wait()
"""
# Like a real engine, this one is killed by the kernel when its driver dies.
DIE_WITH_PARENT = "import ctypes, signal\nctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"


def make_plan(folder: Path, victims: list[Victim], *, behaviour: str = "sturdy", length: int = 60) -> KillPlan:
    text = DRIVER.replace('"import time; time.sleep(600)"', repr(DIE_WITH_PARENT + "import time; time.sleep(600)"))
    if behaviour == "messy":
        text = DRIVER
    (folder / "driver.py").write_text(text)
    metrics = folder / "metrics.jsonl"
    return KillPlan(
        command=[sys.executable, str(folder / "driver.py"), str(metrics), str(length), behaviour],
        env={"RLSCALE_X": "1"},
        metrics=metrics,
        log=folder / "log",
        victims=victims,
        gap_s=(0.1, 0.3),
    )


def test_a_sturdy_run_finishes(tmp_path: Path) -> None:
    lines: list[str] = []
    victims = [Victim.engine, Victim.driver, Victim.engine]
    outcome = KillRunner(make_plan(tmp_path, victims), random.Random(0), report=lines.append).run()
    assert outcome.failure is None
    assert [kill.victim for kill in outcome.kills] == victims
    assert outcome.num_starts == 2
    assert outcome.kills[1].gone_s is not None
    assert all(kill.recovered_s is not None for kill in outcome.kills)
    assert len(lines) == 3
    assert (tmp_path / "metrics.jsonl").read_text().count("step") == 60


def test_a_driver_that_ends_with_its_engine_fails(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, [Victim.engine], behaviour="fragile")
    outcome = KillRunner(plan, random.Random(0), report=lambda _: None).run()
    assert outcome.failure is not None
    assert "code 1" in outcome.failure and "the engine died" in outcome.failure


def test_processes_that_outlive_their_driver_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GONE_TIMEOUT_S", 1.0)
    plan = make_plan(tmp_path, [Victim.driver], behaviour="messy")
    outcome = KillRunner(plan, random.Random(0), report=lambda _: None).run()
    assert outcome.failure is not None and "rlscale.cli.serve" in outcome.failure


def test_a_run_that_ends_before_its_kills_does_not_pass(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, [Victim.driver] * 50, length=1)
    outcome = KillRunner(plan, random.Random(0), report=lambda _: None).run()
    verdict = Verdict(
        command="rlscale-crashtest x",
        machine="here",
        unbroken_s=1.0,
        outcome=outcome,
        num_planned=50,
        differences=[],
        sample_faults=[],
        num_records=1,
    )
    assert not verdict.passed
    assert "finished before all kills were made" in to_markdown(verdict)
