"""Commands, environments and addresses of an engine's processes; one subclass for each kind of server."""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.engines.ports import reserve_port
from rlscale.engines.process import EngineProcess
from rlscale.hosts import LOOPBACK, join_host_port
from rlscale.types import EngineAddress

API_KEY_VARIABLE = "RLSCALE_ENGINE_API_KEY"
"""Environment variable of a server: the key that its clients must send."""

RENDEZVOUS_PORTS = 16
"""Consecutive ports that SGLang derives from the address where its processes meet; it uses up to 14."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """Report of the node of one process of an engine: its address, free ports, and the GPUs of the process."""

    host: str
    port: int
    rendezvous_port: int  # the first of `RENDEZVOUS_PORTS`
    bootstrap_port: int | None = None  # for an engine that needs one
    gpus: tuple[str, ...] = ()  # CUDA devices in the order of the bundles; empty on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlace:
    """Node, ports and GPUs of one process of an engine. The process of node rank 0 serves the engine's requests."""

    host: str  # address of the node, for the server to listen on
    port: int
    node_rank: int = 0
    num_nodes: int = 1
    rendezvous: str | None = None  # host:port of node rank 0, where the processes of several nodes meet
    bootstrap_port: int | None = None  # of the engine, at the host of node rank 0; only of a prefill server
    gpus: tuple[str, ...] = ()  # CUDA devices by rank; empty: those of the actor's environment, or none on a CPU

    @property
    def url(self) -> str:
        return f"http://{join_host_port(self.host, self.port)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLaunch(ABC):
    """Settings of one process of an engine: created by the driver, used on the machine of the process.

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
        """Number of ranks of the engine that join a weight group, over all its processes."""
        return 1

    @property
    def needs_rendezvous(self) -> bool:
        """Whether the ranks of one process, too, meet at an address that is given."""
        return False

    @property
    def needs_bootstrap_port(self) -> bool:
        """Whether other engines ask the engine for the KV cache of a prompt, at a separate port."""
        return False

    def for_engine(self, number: int) -> "EngineLaunch":
        """The settings of one engine of the layout, if they differ from those of others."""
        return self

    def address(self, place: ProcessPlace) -> EngineAddress:
        """The address of the server at a place."""
        return EngineAddress(name=self.name, url=place.url, num_ranks=self.num_ranks, api_key=self.api_key)

    @abstractmethod
    def arguments(self, place: ProcessPlace) -> dict[str, Any]:
        """All arguments of the server, without the key."""

    @abstractmethod
    def command(self, place: ProcessPlace, log_folder: Path) -> list[str]:
        """The command line of the server. May write files into the log folder."""

    @abstractmethod
    def variables(self, place: ProcessPlace) -> dict[str, str]:
        """Environment variables that the launch sets, in addition to those that the server inherits."""

    def inherited(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The part of an actor's environment that the server inherits."""
        return dict(environment)

    def environment(self, place: ProcessPlace) -> dict[str, str]:
        """The whole environment of the server."""
        return self.inherited(os.environ) | self.variables(place)

    def open(self, log_folder: Path, place: ProcessPlace | None = None) -> tuple[EngineAddress, EngineProcess]:
        """Address and process, not started yet, of the server on this machine.

        Args:
            place: None: an engine of one process on this machine, with the GPUs that it sees.
        """
        place = place or local_place(public=self.api_key is not None)
        address = self.address(place)
        process = EngineProcess(
            self.command(place, log_folder),
            name=self.name,
            url=address.url,
            env=self.environment(place),
            log_path=log_folder / f"{self.file_name}_server.log",
            api_key=self.api_key,
        )
        return address, process

    @property
    def file_name(self) -> str:
        """The name as a prefix of file names."""
        return self.name.replace(" ", "_")


def listen_host(*, public: bool) -> str:
    """The address for a server to listen on: loopback, or the address that other machines use for this one."""
    return socket.gethostbyname(socket.gethostname()) if public else LOOPBACK


def local_place(*, public: bool) -> ProcessPlace:
    """The place of a server on this machine, with a free port."""
    host = listen_host(public=public)
    return ProcessPlace(host=host, port=reserve_port(host))


def device_variables(place: ProcessPlace) -> dict[str, str]:
    """The GPUs that a process sees, in the order of its ranks."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus else {}
