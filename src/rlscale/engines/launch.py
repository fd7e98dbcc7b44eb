"""How the server of one engine is started: its command, environment and address. One class for each kind of server."""

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.types import EngineAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLaunch(ABC):
    """Everything an engine needs to know; made by the driver, used on the engine's machine.

    With an `api_key` the server listens on the machine's address, otherwise on loopback only.
    """

    name: str
    model_path: str
    dtype: str
    device: str
    max_context_len: int | None  # None: the model's own
    num_threads: int
    seed: int
    api_key: str | None = field(default=None, repr=False)

    @property
    def num_ranks(self) -> int:
        """Processes of the server that join a weight group."""
        return 1

    @abstractmethod
    def command(self, host: str, port: int, log_folder: Path) -> list[str]:
        """The server's command line. May write files beside the logs."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """All of the server's environment."""

    def open(self, log_folder: Path) -> tuple[EngineAddress, EngineProcess]:
        """Address and (not yet started) process of the server, on this machine."""
        host = own_host(public=self.api_key is not None)
        port = free_port(host)
        address = EngineAddress(
            name=self.name, url=f"http://{host}:{port}", num_ranks=self.num_ranks, api_key=self.api_key
        )
        process = EngineProcess(
            self.command(host, port, log_folder),
            name=self.name,
            url=address.url,
            env=self.environment(),
            log_path=log_folder / f"{self.file_name}_server.log",
            api_key=self.api_key,
        )
        return address, process

    @property
    def file_name(self) -> str:
        """The name as the beginning of file names."""
        return self.name.replace(" ", "_")


def own_host(*, public: bool) -> str:
    """The address a server listens on: loopback, or that under which other machines know this one."""
    return socket.gethostbyname(socket.gethostname()) if public else "127.0.0.1"
