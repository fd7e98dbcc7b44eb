"""Starts a test program as trainer ranks and waits for them."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rlscale.engines.ports import free_port

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, *arguments: str, num_ranks: int = 2, timeout_s: float = 120) -> None:
    """Runs `python -m <module> <rank> <port> <arguments>` for all ranks; a failure shows their output."""
    port = free_port("127.0.0.1")
    with ExitStack() as stack:
        # Files: a rank that fills a pipe, which is read after that of another rank, would wait for ever.
        files = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(port), *arguments],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        try:
            for process in ranks:
                process.wait(timeout=timeout_s)
        finally:
            for process in ranks:
                process.kill()
        outputs = [Path(f"/proc/self/fd/{file.fileno()}").read_text(encoding="utf-8") for file in files]
    assert [process.returncode for process in ranks] == [0] * num_ranks, "\n".join(outputs)


def report(folder: Path, rank: int) -> dict[str, Any]:
    """The content of a rank's `report_<rank>.json`."""
    content: dict[str, Any] = json.loads((folder / f"report_{rank}.json").read_text())
    return content
