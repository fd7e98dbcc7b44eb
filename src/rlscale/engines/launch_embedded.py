"""Starts the embedded engine: `rlscale-serve` in this interpreter."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlscale.engines.launch import EngineLaunch
from rlscale.engines.server.http_server import API_KEY_VARIABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedLaunch(EngineLaunch):
    """The embedded engine, started with `rlscale-serve`."""

    num_slots: int
    deterministic: bool

    def command(self, host: str, port: int, log_folder: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "rlscale.cli.serve",
            f"--model-path={self.model_path}",
            f"--host={host}",
            f"--port={port}",
            f"--dtype={self.dtype}",
            f"--device={self.device}",
            f"--num-slots={self.num_slots}",
            f"--num-threads={self.num_threads}",
            f"--seed={self.seed}",
            "--deterministic" if self.deterministic else "--no-deterministic",
            "--parent-death",
            *([] if self.max_context_len is None else [f"--max-context-len={self.max_context_len}"]),
        ]

    def environment(self) -> dict[str, str]:
        # Ray sets OMP_NUM_THREADS=1 for actors that claim no CPU; the server needs its configured number.
        env = {**os.environ, "OMP_NUM_THREADS": str(self.num_threads)}
        if self.api_key is not None:
            env[API_KEY_VARIABLE] = self.api_key
        return env
