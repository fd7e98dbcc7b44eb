"""Group `sandbox`: places in which programs that the policy wrote run."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class SandboxKind(StrEnum):
    """Backends of sandboxes."""

    subprocess = "subprocess"
    docker = "docker"
    fusion = "fusion"


@dataclass(kw_only=True)
class SandboxConfig(ConfigGroup):
    """Sandboxes for programs that the policy wrote: limited processes without a network, which see no file of the run.
    A trajectory whose sandbox fails has failed with the cause `sandbox` and is generated again; a program that fails or
    exceeds a limit is a result. All keys need `sandbox.kind`.
    """

    kind: SandboxKind | None = None
    """Backend. `subprocess`: processes of the driver's machine in Linux namespaces. `docker`: containers. `fusion`: a
    SandboxFusion service. None: no sandboxes.
    """

    image: Annotated[str, Field(min_length=1)] = "python:3.11-slim"
    """Image of the containers; it has `sh` and, for code, `python3`. Pull it before the run. Only with
    `sandbox.kind=docker`.
    """

    url: Annotated[str | None, Field(min_length=1)] = None
    """URL of the SandboxFusion service, e.g. `http://10.0.0.1:8080`, or of Docker's daemon, e.g.
    `unix:///run/docker.sock`. None: Docker's daemon as in the environment (DOCKER_HOST). No effect with
    `sandbox.kind=subprocess`.
    """

    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Timeout of one program, in seconds. It is killed with all processes that it has started."""

    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Memory of all programs of a sandbox, in MiB. Each process can map at most this much, too. No effect
    with `sandbox.kind=fusion`, whose service has its limits.
    """

    disk_mb: Annotated[int, Field(ge=1)] = 256
    """Size of the files of a sandbox, in MiB. They are in memory."""

    max_processes: Annotated[int, Field(ge=4)] = 64
    """Maximum number of processes and threads in a sandbox. No effect with `sandbox.kind=fusion`."""

    max_output_bytes: Annotated[int, Field(gt=0)] = 65536
    """Bytes kept of each of the two outputs of a program. The rest is dropped."""

    allow_network: bool = False
    """Give programs a network, e.g. to download packages. No effect with `sandbox.kind=fusion`."""

    read_only_folders: list[str] = field(default_factory=list)
    """Absolute paths of further folders that programs can read, e.g. a folder with installed Python packages. Without
    it, they see the system folders, the standard library and their private folder `/sandbox`. Only with
    `sandbox.kind=subprocess`.
    """

    pool_size: Annotated[int, Field(ge=0)] = 2
    """Number of sandboxes that are started before they are needed. No sandbox is used twice."""

    max_running: Annotated[int, Field(gt=0)] = 64
    """Maximum number of sandboxes in use at a time. Further trajectories wait for one."""

    lease_s: Annotated[float, Field(gt=0)] = 3600.0
    """Maximum time for which a trajectory has a sandbox, in seconds. Then the sandbox is stopped."""
