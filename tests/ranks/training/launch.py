"""Starts a test program as trainer ranks and waits for them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlscale.engines.ports import free_port

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, *arguments: str, num_ranks: int = 2, timeout_s: float = 120) -> None:
    """Runs `python -m <module> <rank> <port> <arguments>` for all ranks; a failure shows their output."""
    port = free_port("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(outputs)


def report(folder: Path, rank: int) -> dict[str, Any]:
    """The content of a rank's `report_<rank>.json`."""
    content: dict[str, Any] = json.loads((folder / f"report_{rank}.json").read_text())
    return content
