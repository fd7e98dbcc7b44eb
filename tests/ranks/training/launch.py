"""Starts a test program as trainer ranks and waits for them."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlscale.engines.ports import free_port

ROOT = Path(__file__).parents[3]


class RankServer:
    """The process of this test worker that forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.training.rank_server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._process.kill)
        self._received = b""
        self._started: list[int] = []  # process ids, in the order of the requests
        self._ended: dict[int, int] = {}  # process id -> exit status, of ranks that nothing waits for yet

    def start(self, module: str, arguments: list[str], output: Path) -> int:
        """Forks a rank. Returns its process id."""
        assert self._process.stdin is not None
        request = {"module": module, "arguments": arguments, "output": str(output)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        pid = len(self._started)
        self._receive_until(lambda: len(self._started) > pid, timeout_s=120)
        return self._started[pid]

    def wait(self, pids: list[int], timeout_s: float) -> list[int]:
        """The exit statuses of ranks. Ranks that run longer are killed."""
        try:
            self._receive_until(lambda: self._ended.keys() >= set(pids), timeout_s)
        finally:
            for pid in set(pids) - self._ended.keys():
                os.kill(pid, signal.SIGKILL)
        return [self._ended.pop(pid) for pid in pids]

    def _receive_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not is_done():
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not received:
                raise TimeoutError("the ranks must end in time" if self._process.poll() is None else "no rank server")
            *lines, self._received = (self._received + received).split(b"\n")
            for word, *numbers in (line.decode().split() for line in lines):
                if word == "started":
                    self._started.append(int(numbers[0]))
                else:
                    self._ended[int(numbers[0])] = int(numbers[1])


@cache
def rank_server() -> RankServer:
    """The server, which starts at its first use."""
    return RankServer()


def run_ranks(module: str, *arguments: str, num_ranks: int = 2, timeout_s: float = 120) -> None:
    """Runs `python -m <module> <rank> <port> <arguments>` for all ranks; a failure shows their output."""
    port, server = free_port("127.0.0.1"), rank_server()
    with TemporaryDirectory() as folder:
        # Files: a rank that fills a pipe, which is read after that of another rank, would wait for ever.
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(num_ranks)]
        pids = []
        for rank, output in enumerate(outputs):
            output.touch()
            pids.append(server.start(module, [str(rank), str(port), *arguments], output))
        statuses = server.wait(pids, timeout_s)
        printed = "\n".join(output.read_text(encoding="utf-8") for output in outputs)
    assert statuses == [0] * num_ranks, printed


def report(folder: Path, rank: int) -> dict[str, Any]:
    """The content of a rank's `report_<rank>.json`."""
    content: dict[str, Any] = json.loads((folder / f"report_{rank}.json").read_text())
    return content
