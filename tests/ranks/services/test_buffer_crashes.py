"""The rollout buffer is killed while a producer submits and a run reads: nothing is lost, nothing is read twice."""

from __future__ import annotations

import asyncio
import http.client
import random
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from rlscale.services.buffer_client import BufferAddress, BufferClient
from tests.buffer_process import BufferProcess, call, trajectory

GROUPS_PER_KILL = 25
TASK = {"task_type": "math", "group_size": 2}


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

    def run(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        while len(self.log) < self._num_groups:
            address = BufferAddress(url=self._url)
            client = BufferClient(address, reader="run", announce=lambda: TASK, max_retries=None)
            position = self._random.randrange(len(self.log) + 1)
            self.num_resumed += position < len(self.log)
            for _ in range(20):
                if position == self._num_groups:
                    break
                groups = await client.next_groups(position=position, number=self._random.randint(1, 8))
                for group in groups:
                    assert group["position"] == position
                    if position < len(self.log):
                        assert self.log[position] == group, "a position of the log has one group for ever"
                    else:
                        self.log.append(group)
                    position += 1


def kill_and_compare(folder: Path, *, num_kills: int) -> None:
    num_groups, times = GROUPS_PER_KILL * (num_kills + 1), random.Random(1)
    with BufferProcess(folder) as service:
        submitter, reader = Submitter(service.url, num_groups), Reader(service.url, num_groups)
        submitter.start()
        reader.start()
        for kill in range(1, num_kills + 1):
            goal = 2 * GROUPS_PER_KILL * kill - times.randrange(GROUPS_PER_KILL)
            with submitter.progress:
                assert submitter.progress.wait_for(lambda goal=goal: len(submitter.accepted) >= goal, timeout=300)
            service.kill()
            service.start()
        submitter.join(300)
        reader.join(300)
        assert submitter.fault is None and not submitter.is_alive() and not reader.is_alive()
    ids = [each["id"] for group in reader.log for each in group["trajectories"]]
    assert len(ids) == len(set(ids)) == 2 * num_groups
    assert set(ids) == set(submitter.accepted)
    assert submitter.num_repeated >= num_kills, "each kill was seen"
    assert reader.num_resumed > 0


def test_nothing_is_lost_or_read_twice_when_the_service_is_killed(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, num_kills=3)


@pytest.mark.nightly
def test_nothing_is_lost_or_read_twice_in_20_kills(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, num_kills=20)
