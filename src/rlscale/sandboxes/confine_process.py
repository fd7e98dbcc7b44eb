"""Limits and rights of a program in a sandbox of this machine. Standard library only."""

import os
import resource
from dataclasses import dataclass

from rlscale.sandboxes.linux_calls import drop_capabilities, install_seccomp
from rlscale.sandboxes.seccomp_filter import build_filter

_MAX_FILES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """Limits of the kernel for each process, and for the number of processes."""

    memory_bytes: int
    disk_bytes: int
    max_processes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """Rights of the programs. `drops_user`: the process is still root and has to change its user."""

    user: int
    drops_user: bool
    limits: ProcessLimits


def confine(confinement: Confinement, *, cpu_s: int) -> None:
    """Takes all rights from this process, for good, and sets its limits.

    Args:
        cpu_s: CPU time of each process. A program whose threads all compute reaches it before its deadline.
    """
    limits = confinement.limits
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_NPROC, limits.max_processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))
    if confinement.drops_user:
        os.setgroups([])
        os.setresgid(confinement.user, confinement.user, confinement.user)
        os.setresuid(confinement.user, confinement.user, confinement.user)
    drop_capabilities()
    install_seccomp(build_filter())
