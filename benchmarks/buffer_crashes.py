"""Kills the rollout buffer service while a producer submits and a reader reads, and checks that nothing is lost.

The service runs in another process with a file. A producer submits groups of two, one trajectory after the other, and
repeats what was not answered. A reader reads with the client of runs and, at random, continues at an earlier position,
as a run that resumes. The service is killed (SIGKILL) at random moments and started again with its file. At the end
every accepted trajectory was delivered once, and each position of the log had one group. Writes
`results/crashtest_buffer.md` and `.json`; the exit code is 1 if a check fails.

    python benchmarks/buffer_crashes.py [--kills 20] [--seed 1] [--report FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import machine, sentence

from rlscale.services.buffer_client import BufferAddress, BufferClient

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.buffer_process import BufferProcess, call, trajectory

RESULTS = Path(__file__).parent / "results"
GROUPS_PER_KILL = 25
TASK = {"task_type": "math", "group_size": 2}
TIMEOUT_S = 300.0


@dataclass(kw_only=True)
class BufferKills:
    """Kills of a service, and what was submitted and read between them."""

    num_planned: int
    recovered_s: list[float] = field(default_factory=list)  # from each kill to the next accepted trajectory
    num_submitted: int = 0
    num_repeated: int = 0  # submissions without an answer, which were sent again
    num_resumed: int = 0  # times that the reader continued at an earlier position
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults and len(self.recovered_s) == self.num_planned


class Submitter(threading.Thread):
    """Submits groups of two, one trajectory after the other, and repeats what was not answered."""

    def __init__(self, url: str, num_groups: int) -> None:
        super().__init__(daemon=True)
        self._url, self._num_groups = f"{url}/trajectories", num_groups
        self.accepted: list[str] = []
        self.num_repeated = 0
        self.progress = threading.Condition()
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            for group in range(self._num_groups):
                for number in range(2):
                    self._submit(f"{group}-{number}", str(group))
        except BaseException as error:
            self.fault = error
            raise

    def wait_for(self, number: int) -> bool:
        """Waits until so many trajectories are accepted; False after `TIMEOUT_S`."""
        with self.progress:
            return self.progress.wait_for(lambda: len(self.accepted) >= number, timeout=TIMEOUT_S)

    def _submit(self, name: str, group: str) -> None:
        while True:
            try:
                call(self._url, trajectory(name, group))
                break
            except urllib.error.HTTPError:
                raise
            except (OSError, http.client.HTTPException):  # it is being killed, also within an answer, or restarts
                self.num_repeated += 1
                time.sleep(0.05)  # leaves the processor to the service that starts
        with self.progress:
            self.accepted.append(name)
            self.progress.notify_all()


class Reader(threading.Thread):
    """Reads with the client of runs; at random it starts again at an earlier position, as a run that resumes."""

    def __init__(self, url: str, num_groups: int) -> None:
        super().__init__(daemon=True)
        self._url, self._num_groups, self._random = url, num_groups, random.Random(0)
        self.log: list[dict[str, Any]] = []
        self.num_resumed = 0
        self.faults: list[str] = []

    def run(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        while len(self.log) < self._num_groups and not self.faults:
            address = BufferAddress(url=self._url)
            client = BufferClient(address, reader="run", announce=lambda: TASK, max_retries=None)
            position = self._random.randrange(len(self.log) + 1)
            self.num_resumed += position < len(self.log)
            for _ in range(20):
                if position == self._num_groups:
                    break
                for group in await client.next_groups(position=position, number=self._random.randint(1, 8)):
                    self._add(group, position)
                    position += 1

    def _add(self, group: dict[str, Any], position: int) -> None:
        """Adds the group of a position to the log, or compares it with the one that was read before."""
        if group["position"] != position:
            self.faults.append(f"position {position} was answered with the group of {group['position']}")
        if position == len(self.log):
            self.log.append(group)
        elif self.log[position] != group:
            self.faults.append(f"position {position} had two groups")


def run(folder: Path, *, num_kills: int, seed: int = 1) -> BufferKills:
    """Kills a service with its file in `folder`."""
    num_groups, times, found = (
        GROUPS_PER_KILL * (num_kills + 1),
        random.Random(seed),
        BufferKills(num_planned=num_kills),
    )
    with BufferProcess(folder) as service:
        submitter, reader = Submitter(service.url, num_groups), Reader(service.url, num_groups)
        submitter.start()
        reader.start()
        for kill in range(1, num_kills + 1):
            if not submitter.wait_for(2 * GROUPS_PER_KILL * kill - times.randrange(GROUPS_PER_KILL)):
                break
            began, accepted = time.monotonic(), len(submitter.accepted)
            service.kill()
            service.start()
            # One answer may have been on its way.
            if submitter.wait_for(accepted + 2):
                found.recovered_s.append(time.monotonic() - began)
        submitter.join(TIMEOUT_S)
        reader.join(TIMEOUT_S)
    found.num_submitted, found.num_repeated = len(submitter.accepted), submitter.num_repeated
    found.num_resumed = reader.num_resumed
    found.faults = find_faults(submitter, reader, num_groups)
    return found


def find_faults(submitter: Submitter, reader: Reader, num_groups: int) -> list[str]:
    """Trajectories that were lost or delivered twice, and threads that did not reach their end."""
    faults = list(reader.faults)
    if submitter.fault is not None or submitter.is_alive():
        faults.append(f"the producer did not submit all groups: {submitter.fault or 'it hangs'}")
    if reader.is_alive() or len(reader.log) < num_groups:
        faults.append(f"the reader got {len(reader.log)} of {num_groups} groups")
    ids = [each["id"] for group in reader.log for each in group["trajectories"]]
    if len(ids) != len(set(ids)):
        faults.append(f"{len(ids) - len(set(ids))} trajectories were delivered twice")
    if lost := set(submitter.accepted) - set(ids):
        faults.append(f"{len(lost)} accepted trajectories were not delivered, e.g. {min(lost)}")
    if unknown := set(ids) - set(submitter.accepted):
        faults.append(f"{len(unknown)} trajectories were delivered and not accepted, e.g. {min(unknown)}")
    return faults


def report(found: BufferKills, args: argparse.Namespace, loads: list[float]) -> str:
    median, longest = (f(found.recovered_s or [0.0]) for f in (statistics.median, max))
    lines = [
        f"# Crash test of the rollout buffer: {'passed' if found.passed else 'FAILED'}",
        "",
        *(__doc__ or "").split(" Writes")[0].splitlines(),
        "",
        f"{sentence(loads)} {len(found.recovered_s)} of {found.num_planned} planned kills (SIGKILL), "
        f"{found.num_submitted:,} trajectories, {found.num_repeated:,} requests without an answer, "
        f"{found.num_resumed:,} times read from an earlier position. "
        f"Made by `python benchmarks/buffer_crashes.py --kills {args.kills}`.",
        "",
        *(f"- {fault}" for fault in found.faults),
        *(["- Every accepted trajectory was delivered once; no position had two groups."] if found.passed else []),
        "",
        "| killed | times | recovered after, median s | recovered after, max s |",
        "|---|---|---|---|",
        f"| buffer | {len(found.recovered_s)} | {median:.1f} | {longest:.1f} |",
        "",
        '"Recovered" is the time from the kill to the next accepted trajectories, with the start of the service.',
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="seed for the times of the kills")
    parser.add_argument("--report", type=Path, default=RESULTS, help="folder of the report")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="buffer-crashes-") as folder:
        found = run(Path(folder), num_kills=args.kills, seed=args.seed)
    text = report(found, args, [load, os.getloadavg()[0]])
    sys.stdout.write(text)
    args.report.mkdir(parents=True, exist_ok=True)
    (args.report / "crashtest_buffer.md").write_text(text)
    content = {"machine": machine(), "passed": found.passed, **asdict(found)}
    (args.report / "crashtest_buffer.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
