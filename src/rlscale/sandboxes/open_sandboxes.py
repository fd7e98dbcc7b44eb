"""Sandboxes as the config describes them."""

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from rlscale.config.groups.sandbox import SandboxConfig, SandboxKind
from rlscale.errors import SandboxError
from rlscale.sandboxes.docker_sandbox import DockerSandbox
from rlscale.sandboxes.fusion_sandbox import FusionSandbox
from rlscale.sandboxes.sandbox import Sandbox, SandboxLimits
from rlscale.sandboxes.sandbox_pool import SandboxPool
from rlscale.sandboxes.subprocess_sandbox import SubprocessSandbox

_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, SandboxPool] = WeakKeyDictionary()


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """A new sandbox, not started. Raises SandboxError without `sandbox.kind`."""
    if config.kind is None:
        raise SandboxError("sandbox.kind must be set to use sandboxes, got null; set it to subprocess")
    return _BACKENDS[config.kind](config)


def open_pool(config: SandboxConfig) -> SandboxPool:
    """A new pool of sandboxes, for `async with`."""
    return SandboxPool(
        lambda: open_sandbox(config),
        size=config.pool_size if config.kind is not None else 0,
        max_running=config.max_running,
        lease_s=config.lease_s,
    )


def shared_pool(config: SandboxConfig) -> SandboxPool:
    """The pool of the running event loop, which opens with the first call. Its sandboxes end with this process."""
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        _pools[loop] = open_pool(config)
    return _pools[loop]


def limits_of(config: SandboxConfig) -> SandboxLimits:
    """The limits of each sandbox, in bytes."""
    return SandboxLimits(
        timeout_s=config.timeout_s,
        memory_bytes=config.memory_mb * 2**20,
        disk_bytes=config.disk_mb * 2**20,
        max_output_bytes=config.max_output_bytes,
        max_processes=config.max_processes,
        has_network=config.allow_network,
    )


def find_sandbox_fault(config: SandboxConfig) -> str | None:
    """Starts one sandbox and runs a program in it; returns the reason if that fails."""
    return asyncio.run(_try(config))


async def _try(config: SandboxConfig) -> str | None:
    sandbox = open_sandbox(config)
    try:
        await sandbox.start()
        result = await sandbox.exec(code="print(6 * 7)", timeout_s=60.0)
    except SandboxError as error:
        return str(error)
    finally:
        await sandbox.stop()
    return None if result.stdout.strip() == "42" else f"a program in it failed: {result.stderr.strip()[-500:]}"


def _subprocess(config: SandboxConfig) -> Sandbox:
    return SubprocessSandbox(limits_of(config), read_only=config.read_only_folders)


def _docker(config: SandboxConfig) -> Sandbox:
    return DockerSandbox(limits_of(config), image=config.image, url=config.url)


def _fusion(config: SandboxConfig) -> Sandbox:
    assert config.url is not None, "a rule requires it"
    return FusionSandbox(limits_of(config), url=config.url)


_BACKENDS: dict[SandboxKind, Callable[[SandboxConfig], Sandbox]] = {
    SandboxKind.subprocess: _subprocess,
    SandboxKind.docker: _docker,
    SandboxKind.fusion: _fusion,
}
