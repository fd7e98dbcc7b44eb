"""Runs a command to its end while killing parts of its run, starting it again whenever the driver was hit."""

import os
import random
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlscale.crashtest.victims import MARK, Victim, candidates, kill, processes
from rlscale.observe.jsonl import read_records

POLL_S = 0.1
CLEAN_WITHIN_S = 30.0
SILENT_FOR_S = 600.0
EARLY_SHARE = 0.3
LOG_LINES = 15


@dataclass(kw_only=True, slots=True)
class Kill:
    """One kill and what came of it."""

    victim: Victim
    at_s: float  # since the first start
    records: int  # lines of the metrics file at that moment
    back_s: float | None = None  # until metrics were written again; None: the next kill or the end came first
    clean_s: float | None = None  # of a driver: until no process of its run was left


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What happened to a run under test."""

    kills: list[Kill] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    failure: str | None = None  # why the run did not come to its end


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What is to be done to a run."""

    command: Sequence[str]
    env: Mapping[str, str]
    metrics: Path
    log: Path
    victims: Sequence[Victim]  # in the order in which they are killed
    gap_s: tuple[float, float]  # shortest and longest time from a start or kill to the next kill


class Player:
    """Plays one script. The kinds of the kills are given; moment and process are drawn from `rng`.

    Args:
        tell: gets a line for each kill.
    """

    def __init__(self, script: Script, rng: random.Random, *, tell: Callable[[str], None]) -> None:
        self._script, self._rng, self._tell = script, rng, tell
        self._left = list(script.victims)
        self._began = time.monotonic()
        self._due = self._wait_s = self._planned_at = 0.0
        self.outcome = Outcome()

    def play(self) -> Outcome:
        """Starts the command until it ends by itself, and kills on the way."""
        while not self._live_once():
            pass
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def _live_once(self) -> bool:
        """One life of the driver; True when the run is over, well or not."""
        mark = uuid.uuid4().hex
        env = {**os.environ, **self._script.env, MARK: mark}
        with self._script.log.open("ab") as log:
            driver = subprocess.Popen(self._script.command, stdout=log, stderr=log, env=env)
        self.outcome.num_starts += 1
        try:
            return self._watch(driver, mark)
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()

    def _watch(self, driver: "subprocess.Popen[bytes]", mark: str) -> bool:
        self._plan_next()
        while driver.poll() is None:
            self._look_for_progress()
            if self._is_silent():
                self.outcome.failure = f"no metrics for {SILENT_FOR_S:.0f} s: the run hangs"
                return True
            if self._left and time.monotonic() >= self._due and self._kill(driver.pid, mark):
                self._plan_next()
                if self.outcome.kills[-1].victim == Victim.driver:
                    driver.wait()
                    self._wait_until_clean(mark)
                    return self.outcome.failure is not None
            time.sleep(POLL_S)
        self._look_for_progress()
        if driver.returncode != 0:
            tail = self._script.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            self.outcome.failure = f"the driver ended by itself with code {driver.returncode}:\n" + "\n".join(tail)
        return True

    def _plan_next(self) -> None:
        """Draws the moment of the next kill: some come while the run is still starting, most once it is at work."""
        self._wait_s = self._rng.uniform(*self._script.gap_s)
        self._planned_at = time.monotonic() - self._began
        self._due = time.monotonic() + self._wait_s if self._rng.random() < EARLY_SHARE else float("inf")

    def _kill(self, driver: int, mark: str) -> bool:
        """Kills the next victim; False while there is none of its kind."""
        victim = self._left[0]
        found = candidates(victim, driver=driver, mark=mark)
        if not found or not kill(self._rng.choice(found)):
            return False
        self._left.pop(0)
        at_s = time.monotonic() - self._began
        self.outcome.kills.append(Kill(victim=victim, at_s=at_s, records=self._num_records()))
        number, total = len(self.outcome.kills), len(self._script.victims)
        self._tell(f"kill {number}/{total}: {victim} at {at_s:.1f} s, {self.outcome.kills[-1].records} metrics records")
        return True

    def _wait_until_clean(self, mark: str) -> None:
        began = time.monotonic()
        while remaining := processes(mark):
            if time.monotonic() - began > CLEAN_WITHIN_S:
                self.outcome.failure = f"{CLEAN_WITHIN_S:.0f} s after its driver there still was {remaining}"
                for pid in remaining:
                    kill(pid)
                return
            time.sleep(POLL_S)
        self.outcome.kills[-1].clean_s = time.monotonic() - began

    def _look_for_progress(self) -> None:
        kills, now = self.outcome.kills, time.monotonic() - self._began
        if kills and kills[-1].back_s is None and self._written_after(kills[-1].at_s):
            kills[-1].back_s = now - kills[-1].at_s
        if self._due == float("inf") and self._written_after(self._planned_at):
            self._due = time.monotonic() + self._wait_s

    def _is_silent(self) -> bool:
        last = self.outcome.kills[-1].at_s if self.outcome.kills else 0.0
        waited = time.monotonic() - self._began - last
        return waited > SILENT_FOR_S and not self._written_after(time.monotonic() - self._began - SILENT_FOR_S)

    def _written_after(self, at_s: float) -> bool:
        """Whether a record was written after a moment, counted as `Kill.at_s` is."""
        try:
            *_, last = read_records(self._script.metrics)
        except (FileNotFoundError, ValueError):
            return False  # there is no file yet, or no record in it
        return float(last["time"]) > time.time() - (time.monotonic() - self._began - at_s)

    def _num_records(self) -> int:
        try:
            return self._script.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0
