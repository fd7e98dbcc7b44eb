"""Command, environment and address of an engine server; one subclass for each kind of server."""

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.types import EngineAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLaunch(ABC):
    """Settings of one engine server: created by the driver, used on the machine of the engine.

    With an `api_key` the server listens on the machine's address, otherwise on loopback only.
    """

    name: str
    model_path: str
    dtype: str
    device: str
    max_context_len: int | None  # None: that of the model
    num_threads: int
    seed: int
    api_key: str | None = field(default=None, repr=False)

    @property
    def num_ranks(self) -> int:
        """Number of processes of the server that join a weight group."""
        return 1

    @abstractmethod
    def command(self, host: str, port: int, log_folder: Path) -> list[str]:
        """The command line of the server. May write files into the log folder."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The whole environment of the server."""

    def open(self, log_folder: Path) -> tuple[EngineAddress, EngineProcess]:
        """Address and process, not started yet, of the server on this machine."""
        host = listen_host(public=self.api_key is not None)
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
        """The engine name as a prefix of file names."""
        return self.name.replace(" ", "_")


def listen_host(*, public: bool) -> str:
    """The address for a server to listen on: loopback, or the address that other machines use for this one."""
    return socket.gethostbyname(socket.gethostname()) if public else "127.0.0.1"
