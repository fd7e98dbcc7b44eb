"""How the server of one engine is started: the command line, its environment and its address."""

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rlscale.engines.process import EngineProcess
from rlscale.engines.serving import API_KEY_VARIABLE
from rlscale.types import EngineAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLaunch:
    """Everything an engine needs to know; made by the driver, used on the engine's machine.

    With an `api_key` the server listens on the machine's address, otherwise on loopback only.
    """

    name: str
    model_path: str
    dtype: str
    device: str
    num_slots: int
    deterministic: bool
    max_context_len: int | None  # None: the model's own
    num_threads: int
    seed: int
    api_key: str | None = field(default=None, repr=False)

    def open(self, log_folder: Path) -> tuple[EngineAddress, EngineProcess]:
        """Address and (not yet started) process of the server, on this machine."""
        host = "127.0.0.1" if self.api_key is None else socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        address = EngineAddress(name=self.name, url=f"http://{host}:{port}", api_key=self.api_key)
        process = EngineProcess(
            self._command(host, port),
            name=self.name,
            url=address.url,
            env=self._environment(),
            log_path=log_folder / f"{self.name.replace(' ', '_')}_server.log",
            api_key=self.api_key,
        )
        return address, process

    def _command(self, host: str, port: int) -> list[str]:
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

    def _environment(self) -> dict[str, str]:
        # Ray sets OMP_NUM_THREADS=1 for actors that claim no CPU; the server is told its own number.
        env = {**os.environ, "OMP_NUM_THREADS": str(self.num_threads)}
        if self.api_key is not None:
            env[API_KEY_VARIABLE] = self.api_key
        return env
