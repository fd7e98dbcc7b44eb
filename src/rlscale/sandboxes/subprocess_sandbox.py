"""Sandbox on this machine: processes in Linux namespaces, without network and with a private folder."""

import asyncio
import json
import os
import signal
import site
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlscale.errors import SandboxError
from rlscale.sandboxes.namespace_root import HOME
from rlscale.sandboxes.sandbox import CODE_FILE, ExecResult, SandboxLimits, command_of, decode, encode
from rlscale.sandboxes.sandbox_frames import SIZES_BYTES, pack_sandbox_frame, unpack_sizes
from rlscale.sandboxes.sandbox_starter import starter

_START_TIMEOUT_S = 30.0
_EXTRA_S = 20.0  # that the first process has to end a job after its deadline
_FILE_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_NOTES = {"timeout": "rlscale: timed out", "memory": "rlscale: killed, because it used too much memory"}


class SubprocessSandbox:
    """A `Sandbox` of Linux namespaces: PID, mount, network, IPC and host name.

    As root its programs run as a user that nothing else on the machine has; otherwise in a user namespace. Either way
    they see only system folders, Python and their private folder, which is in memory.

    Args:
        read_only: further folders of the machine that programs may read.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, read_only: Sequence[str] = ()) -> None:
        self._limits = limits or SandboxLimits()
        self._python = os.path.realpath(sys.executable)
        self._read_only = [os.path.realpath(sys.base_prefix), *map(os.path.abspath, read_only)]
        self._pid: int | None = None  # of its outer process
        self._socket: socket.socket | None = None
        self._is_running = self._has_stopped = False
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "SubprocessSandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """See `Sandbox`."""
        if sys.platform != "linux":
            raise SandboxError("a sandbox of this machine needs Linux; use docker")
        if self._socket is not None or self._has_stopped:
            raise SandboxError("a sandbox starts once")
        limits = self._limits
        setup = {
            "read_only": self._read_only,
            # What happens to be installed must not change a result, and Python starts in half of the time without it.
            "hidden": [os.path.realpath(path) for path in site.getsitepackages([sys.base_prefix])],
            "python": self._python,
            "has_network": limits.has_network,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "max_processes": limits.max_processes,
            "max_output_bytes": limits.max_output_bytes,
        }
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            with theirs:
                self._pid = starter.start_process(theirs)
        except OSError as error:
            raise SandboxError(f"a sandbox did not start: {error}") from error
        self._is_running = True
        try:
            reply, _ = await self._call(setup, b"", timeout_s=_START_TIMEOUT_S)
        except SandboxError as error:
            raise SandboxError(f"a sandbox did not start: {error}") from error
        if "error" in reply:
            await self.stop()
            raise SandboxError(f"a sandbox did not start: {reply['error']}; use docker, or a machine with namespaces")

    async def exec(
        self,
        command: str | Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """See `Sandbox`."""
        words = command_of(command, code, python=self._python)
        timeout_s = self._limits.timeout_s if timeout_s is None else timeout_s
        async with self._lock:
            if code is not None:
                await self._write(CODE_FILE, encode(code))
            request = {"kind": "exec", "command": words, "env": self._environment(), "timeout_s": timeout_s}
            reply, output = await self._call(request, encode(stdin), timeout_s=timeout_s + _EXTRA_S)
        stderr = decode(output[reply["stdout_bytes"] :])
        note = _NOTES.get(reply["end"])
        return ExecResult(
            stdout=decode(output[: reply["stdout_bytes"]]),
            stderr=stderr if note is None else "\n".join(filter(None, (stderr.rstrip("\n"), note))),
            exit_code=reply["exit_code"],
            timed_out=reply["end"] == "timeout",
            truncated=reply["is_cut"],
            duration_s=reply["duration_s"],
        )

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        async with self._lock:
            return await self._file_call("read", path, b"")

    async def write(self, path: str, data: str | bytes) -> None:
        """See `Sandbox`."""
        async with self._lock:
            await self._write(path, encode(data))

    async def stop(self) -> None:
        """See `Sandbox`."""
        self._end()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S), self._lock:  # a call that waits reads end-of-file
                await self._close()
        except TimeoutError:
            # It has the socket open, so that the number is still its own. Its inner process ends with it.
            if self._pid is not None and self._socket is not None:
                with suppress(ProcessLookupError):  # it has ended in this moment
                    os.kill(self._pid, signal.SIGKILL)
            async with self._lock:
                await self._close()

    async def _close(self) -> None:
        """Waits until no process of the sandbox is left: the last one closes the other end of the socket."""
        self._has_stopped = True
        if self._socket is None:
            return
        with suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16):
                pass
        self._socket.close()
        self._socket = None

    async def _write(self, path: str, data: bytes) -> None:
        await self._file_call("write", path, data)

    async def _file_call(self, kind: str, path: str, data: bytes) -> bytes:
        if "\0" in path:
            raise ValueError("a path must not contain a zero byte")
        request = {"kind": kind, "path": path, "timeout_s": _FILE_TIMEOUT_S}
        reply, output = await self._call(request, data, timeout_s=_FILE_TIMEOUT_S + _EXTRA_S)
        code = reply["exit_code"]
        if reply["end"] or code >= 128:
            raise OSError(f"{kind} of {path} was ended by the limits of the sandbox")
        if code:
            raise OSError(code, os.strerror(code), path)
        return output[: reply["stdout_bytes"]]

    def _environment(self) -> dict[str, str]:
        """All that a program gets: nothing of the environment of the run, which may contain secrets."""
        folders = dict.fromkeys((os.path.dirname(self._python), "/usr/local/bin", "/usr/bin", "/bin"))
        return {"HOME": HOME, "LANG": "C.UTF-8", "PATH": ":".join(folders), "TMPDIR": "/tmp"}

    async def _call(self, request: dict[str, Any], payload: bytes, *, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Sends a request and returns its answer. Whatever goes wrong, the sandbox is of no more use."""
        if not self._is_running or self._socket is None:
            raise SandboxError("the sandbox is not running")
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._socket, pack_sandbox_frame(request, payload))
                sizes = unpack_sizes(await self._receive(SIZES_BYTES))
                header, output = await self._receive(sizes[0]), await self._receive(sizes[1])
        except BaseException as error:
            self._end()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"a sandbox did not answer within {timeout_s:g} s") from error
            if isinstance(error, OSError | EOFError | ValueError):
                raise SandboxError("a sandbox ended") from error
            raise
        return json.loads(header), output

    async def _receive(self, num_bytes: int) -> bytes:
        assert self._socket is not None, "the sandbox has started"
        loop, content, received = asyncio.get_running_loop(), bytearray(num_bytes), 0
        view = memoryview(content)
        while received < num_bytes:
            count = await loop.sock_recv_into(self._socket, view[received:])
            if not count:
                raise EOFError("closed")
            received += count
        return bytes(content)

    def _end(self) -> None:
        """Ends the connection, at which the first process ends, and with it all others."""
        self._is_running = False
        if self._socket is not None:
            with suppress(OSError):  # the other end has closed
                self._socket.shutdown(socket.SHUT_WR)
