"""The process reaper ends every process of a session, and no other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlscale.cluster.process_reaper import MARK, marked_processes, marked_trees, reaped_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

DRIVER = f"""
import os, subprocess, sys, time
from rlscale.cluster.process_reaper import MARK, reaped_session
with reaped_session():
    subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
    sys.stdout.write(os.environ[MARK] + "\\n")
    sys.stdout.flush()
    time.sleep(600)
"""


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_a_session_ends_its_processes() -> None:
    with reaped_session():
        mark = os.environ[MARK]
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
        assert eventually(lambda: child.pid in marked_processes(mark))
    assert child.wait(timeout=10) == -signal.SIGKILL
    assert MARK not in os.environ


def test_the_mark_is_found_at_any_place_of_an_environment() -> None:
    """Environments are read in parts of 4,096 bytes."""
    children = {}
    for length in (0, 4000, 4060, 4070, 4080, 4090, 4100, 9000):
        env = {"A": "x" * length, MARK: "some_mark", "B": "y"} if length else {MARK: "some_mark"}
        child = subprocess.Popen(["/bin/sleep", "600"], env=env)
        children[child.pid] = child
    other = subprocess.Popen(["/bin/sleep", "600"], env={"A": f"{MARK}=some_mark", MARK: "some_mark_too"})
    try:
        assert eventually(lambda: set(marked_processes("some_mark")) == set(children))
    finally:
        for child in (*children.values(), other):
            child.kill()
            child.wait()


# Like a process that has overwritten its environment: its child has no mark.
WITH_UNMARKED_CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], env={{}}, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_children_without_the_mark_end_too() -> None:
    with reaped_session():
        parent = subprocess.Popen([sys.executable, "-c", WITH_UNMARKED_CHILD], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert child in {pid for pid, _ in marked_trees(os.environ[MARK])}
    assert parent.wait(timeout=10) == -signal.SIGKILL
    assert eventually(lambda: not Path(f"/proc/{child}").exists())


def test_other_processes_keep_running() -> None:
    other = subprocess.Popen([sys.executable, "-c", STUBBORN], env={**os.environ, MARK: "another"})
    with reaped_session():
        assert eventually(lambda: other.pid in marked_processes("another"))
    assert other.poll() is None
    other.kill()
    other.wait()


def test_no_process_outlives_a_killed_driver() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    mark = driver.stdout.readline().strip()
    assert eventually(lambda: len(marked_processes(mark)) == 1)
    driver.kill()
    driver.wait()
    assert eventually(lambda: marked_processes(mark) == [])
