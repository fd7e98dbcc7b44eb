"""Runs a command to its end while killing processes of its run, and restarts it when the driver was killed."""

import os
import random
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rlscale.crashtest.node_pool import NodePool
from rlscale.crashtest.victims import MARK, Victim, candidates, kill, processes
from rlscale.observe.jsonl import read_records

POLL_S = 0.1
GONE_TIMEOUT_S = 30.0
SILENCE_TIMEOUT_S = 600.0
EARLY_SHARE = 0.3
"""Share of the kills that may happen while the run is still starting."""
LOG_LINES = 15


@dataclass(kw_only=True, slots=True)
class Kill:
    """One kill and its effects."""

    victim: Victim
    at_s: float  # since the first start
    records: int  # lines of the metrics file at that time
    recovered_s: float | None = None  # until the next metrics record; None: another kill or the end came first
    gone_s: float | None = None  # of a driver: until no process of its run was left


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Kills and end of a run under test."""

    kills: list[Kill] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    failure: str | None = None  # why the run did not finish


@dataclass(frozen=True, kw_only=True, slots=True)
class KillPlan:
    """A command and the kills during its run."""

    command: Sequence[str]
    env: Mapping[str, str]
    metrics: Path
    log: Path
    victims: Sequence[Victim]  # in the order of the kills
    gap_s: tuple[float, float]  # shortest and longest time from a start or kill to the next kill
    nodes: NodePool | None = None  # on which the run takes place; None: on this machine alone


def start_driver(
    command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes], nodes: NodePool | None
) -> "subprocess.Popen[bytes]":
    """Starts the command of a run on the head node of `nodes`, or on this machine."""
    if nodes is not None:
        return nodes.start_driver(command, env=env, output=output)
    return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **env})


class KillRunner:
    """Executes one plan. It gives the kinds of the kills; times and processes are drawn from `rng`.

    Args:
        report: gets a line for each kill.
    """

    def __init__(self, plan: KillPlan, rng: random.Random, *, report: Callable[[str], None]) -> None:
        self._plan, self._rng, self._report = plan, rng, report
        self._victims = list(plan.victims)
        self._began = time.monotonic()
        self._due = self._wait_s = self._planned_at = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Starts the command until it ends by itself, and kills processes while it runs."""
        while not self._run_driver():
            pass
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def _run_driver(self) -> bool:
        """Runs the driver until it ends or is killed; True when the run is over, finished or failed."""
        # A new mark for each start: processes of an earlier driver must not count as those of this one.
        mark = uuid.uuid4().hex
        env = {**self._plan.env, MARK: mark}
        with self._plan.log.open("ab") as log:
            driver = start_driver(self._plan.command, env=env, output=log, nodes=self._plan.nodes)
        self.outcome.num_starts += 1
        try:
            return self._watch(driver, mark)
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()

    def _watch(self, driver: "subprocess.Popen[bytes]", mark: str) -> bool:
        self._schedule_next()
        while driver.poll() is None:
            if self._plan.nodes is not None:
                self._plan.nodes.start_due()
            self._check_progress()
            if self._is_silent():
                self.outcome.failure = f"no metrics for {SILENCE_TIMEOUT_S:.0f} s: the run hangs"
                return True
            if self._victims and time.monotonic() >= self._due and self._kill(driver.pid, mark):
                self._schedule_next()
                if self.outcome.kills[-1].victim == Victim.driver:
                    driver.wait()
                    self._wait_until_gone(mark)
                    return self.outcome.failure is not None
            time.sleep(POLL_S)
        self._check_progress()
        if driver.returncode != 0:
            tail = self._plan.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            self.outcome.failure = f"the driver ended without a kill, with code {driver.returncode}:\n" + "\n".join(
                tail
            )
        return True

    def _schedule_next(self) -> None:
        """Draws the time of the next kill."""
        self._wait_s = self._rng.uniform(*self._plan.gap_s)
        self._planned_at = time.monotonic() - self._began
        # Most kills wait for the first metrics, which set their time: see `_check_progress`.
        self._due = time.monotonic() + self._wait_s if self._rng.random() < EARLY_SHARE else float("inf")

    def _kill(self, driver: int, mark: str) -> bool:
        """Kills a process of the next kind; False while there is none."""
        victim = self._victims[0]
        if not self._kill_victim(victim, driver, mark):
            return False
        self._victims.pop(0)
        at_s = time.monotonic() - self._began
        self.outcome.kills.append(Kill(victim=victim, at_s=at_s, records=self._num_records()))
        number, total = len(self.outcome.kills), len(self._plan.victims)
        self._report(
            f"kill {number}/{total}: {victim} at {at_s:.1f} s, {self.outcome.kills[-1].records} metrics records"
        )
        return True

    def _kill_victim(self, victim: Victim, driver: int, mark: str) -> bool:
        if victim == Victim.node:
            assert self._plan.nodes is not None, "the command plans kills of nodes only where there are nodes"
            return self._plan.nodes.kill_one() is not None
        found = candidates(victim, driver=driver, mark=mark)
        return bool(found) and kill(self._rng.choice(found))

    def _wait_until_gone(self, mark: str) -> None:
        began = time.monotonic()
        while remaining := processes(mark):
            if time.monotonic() - began > GONE_TIMEOUT_S:
                self.outcome.failure = f"still running {GONE_TIMEOUT_S:.0f} s after the driver ended: {remaining}"
                for pid in remaining:
                    kill(pid)
                return
            time.sleep(POLL_S)
        self.outcome.kills[-1].gone_s = time.monotonic() - began

    def _check_progress(self) -> None:
        kills, now = self.outcome.kills, time.monotonic() - self._began
        if kills and kills[-1].recovered_s is None and self._written_after(kills[-1].at_s):
            kills[-1].recovered_s = now - kills[-1].at_s
        if self._due == float("inf") and self._written_after(self._planned_at):
            self._due = time.monotonic() + self._wait_s

    def _is_silent(self) -> bool:
        last = self.outcome.kills[-1].at_s if self.outcome.kills else 0.0
        waited = time.monotonic() - self._began - last
        return waited > SILENCE_TIMEOUT_S and not self._written_after(
            time.monotonic() - self._began - SILENCE_TIMEOUT_S
        )

    def _written_after(self, at_s: float) -> bool:
        """Whether a record was written after a time, measured like `Kill.at_s`."""
        try:
            *_, last = read_records(self._plan.metrics)
        except (FileNotFoundError, ValueError):
            return False  # no file yet, or no record in it
        # Records have wall-clock times, and kills seconds since the start.
        return float(last["time"]) > time.time() - (time.monotonic() - self._began - at_s)

    def _num_records(self) -> int:
        try:
            return self._plan.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0
