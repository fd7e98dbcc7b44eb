"""The rollout buffer service in a separate process, and trajectories for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

START_S = 60.0


class BufferProcess:
    """A service that can be killed and started again with its file, at the same port.

    Example:
        with BufferProcess(folder) as service:
            call(service.url + "/trajectories", [trajectory("a-0", "a")])
    """

    def __init__(self, folder: Path, *arguments: str, api_key: str | None = None) -> None:
        self.folder, self._arguments, self._port, self._num_starts = folder, arguments, 0, 0
        self._env = {**os.environ, **({} if api_key is None else {"RLSCALE_BUFFER_API_KEY": api_key})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns when the service listens."""
        self._num_starts += 1
        log = self.folder / f"buffer-{self._num_starts}.log"
        words = ("--file", str(self.folder / "buffer.sqlite3"), "--port", str(self._port), *self._arguments)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlscale.cli.buffer", *words], env=self._env, stdout=file, stderr=file
            )
        deadline_s = time.monotonic() + START_S
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
            assert self._process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.02)
        self._port = int(found[1])

    @property
    def pid(self) -> int:
        assert self._process is not None, "started before"
        return self._process.pid

    def kill(self) -> None:
        """Kills the process, as `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> BufferProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def trajectory(name: str, group: str, **changes: Any) -> dict[str, Any]:
    """A trajectory of a group of two."""
    fields = {
        "id": name,
        "group": group,
        "group_size": 2,
        "prompt": {"token_ids": [1, 2], "text": "1+1="},
        "response_ids": [3, 4, 5],
        "logprobs": [-0.1, -0.2, -0.3],
        "weight_versions": 0,
        "reward": 1.0,
    }
    return fields | changes


def call(url: str, body: Any = None, *, key: str | None = None, timeout_s: float = 30.0) -> Any:
    """The JSON answer; raises URLError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s) as response:
        return json.load(response)
