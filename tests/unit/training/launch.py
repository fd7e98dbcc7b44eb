"""Starts a test program as two trainer ranks and waits for them."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, *words: str) -> None:
    """Runs `python -m <module> <rank> <port> <words>` for ranks 0 and 1; fails with what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def report(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank wrote to `report_<rank>.json`."""
    content: dict[str, Any] = json.loads((folder / f"report_{rank}.json").read_text())
    return content
