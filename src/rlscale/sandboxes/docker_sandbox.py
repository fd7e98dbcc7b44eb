"""Sandbox in a container of Docker."""

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import CODE_FILE, KILLED_CODE, ExecResult, SandboxLimits, command_of, decode, encode
from rlscale.sandboxes.shell_files import READ_SCRIPT, WRITE_SCRIPT, file_error

if TYPE_CHECKING:
    from docker.api.client import APIClient

HOME = "/sandbox"
PYTHON = "python3"
USER = "65534:65534"
LABEL = "rlscale.sandbox"
_API_TIMEOUT_S = 60.0
_FILE_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 5.0
_CHUNK = 1 << 16
_FRAME = struct.Struct(">BxxxI")  # stream and length
_STDOUT, _STDERR = 1, 2

# Waits for a line, because output before the client reads would be lost, and ends with all processes of the program.
_WRAPPER = 'read -r _; "$@"; code=$?; kill -9 -1 2>/dev/null; exit $code'
_KILL = ["sh", "-c", "kill -9 -1"]
# The first process ends when the run closes its input, or dies; then the daemon removes the container.
_FIRST = ["cat"]

T = TypeVar("T")


class DockerSandbox:
    """A `Sandbox` in a container without network, with a read-only image, limits and a user without rights.

    The image needs `sh` and, for code, `python3`. A program that leaves no process for a `kill` makes the container
    restart: its files are gone then.

    Args:
        url: address of the daemon, e.g. `unix:///var/run/docker.sock`. None: that of the environment (DOCKER_HOST), or
            the usual socket.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, image: str, url: str | None = None) -> None:
        self._limits, self._image, self._url = limits or SandboxLimits(), image, url
        self._client: APIClient | None = None
        self._container = ""
        self._attached: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._has_started = False

    async def __aenter__(self) -> "DockerSandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """See `Sandbox`."""
        if self._has_started:
            raise SandboxError("a sandbox starts once")
        self._has_started = True
        if find_spec("docker") is None:
            raise SandboxError("sandboxes of docker need the package docker; pip install 'rlscale[docker]'")
        try:
            await self._in_thread(self._create)
        except SandboxError as error:
            await self.stop()
            raise SandboxError(f"a sandbox of docker did not start: {error}") from error

    async def exec(
        self,
        command: str | Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """See `Sandbox`."""
        words = command_of(command, code, python=PYTHON)
        timeout_s = self._limits.timeout_s if timeout_s is None else timeout_s
        async with self._lock:
            if code is not None:
                await self._write(CODE_FILE, encode(code))
            return await self._run(words, encode(stdin), timeout_s=timeout_s, max_bytes=self._limits.max_output_bytes)

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        async with self._lock:
            output = _Output(self._limits.disk_bytes)
            code = await self._collect(["sh", "-c", READ_SCRIPT, "sh", path], b"", output, timeout_s=_FILE_TIMEOUT_S)
            if code:
                raise file_error(code, path)
            return bytes(output.streams[_STDOUT])

    async def write(self, path: str, data: str | bytes) -> None:
        """See `Sandbox`."""
        async with self._lock:
            await self._write(path, encode(data))

    async def stop(self) -> None:
        """See `Sandbox`."""
        self._stopping.set()
        if self._attached is not None:
            self._attached.close()
            self._attached = None
        if self._container:
            container, self._container = self._container, ""
            with suppress(SandboxError):  # without its input it ends by itself
                await self._in_thread(lambda: self._api.remove_container(container, v=True, force=True))
        async with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    @property
    def _api(self) -> "APIClient":
        assert self._client is not None, "the sandbox has started"
        return self._client

    def _create(self) -> None:
        # Imported here: an optional package, of which no other backend needs anything.
        from docker.api.client import APIClient
        from docker.utils import kwargs_from_env

        given = kwargs_from_env() if self._url is None else {"base_url": self._url}
        self._client = client = APIClient(version="auto", timeout=_API_TIMEOUT_S, **given)
        limits = self._limits
        tmpfs = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},mode=0700,uid=65534,gid=65534"
        memory = limits.memory_bytes + limits.disk_bytes  # the kernel counts files in memory, too
        host_config = client.create_host_config(
            auto_remove=True,
            network_mode="bridge" if limits.has_network else "none",
            read_only=True,
            tmpfs={HOME: tmpfs, "/tmp": tmpfs},
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=limits.max_processes,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            init=True,
        )
        created = client.create_container(
            self._image,
            command=_FIRST,
            stdin_open=True,
            user="0:0",  # programs, which have another user, cannot end the first process
            working_dir=HOME,
            host_config=host_config,
            labels=[LABEL],
        )
        self._container = str(created["Id"])
        self._attach_and_start()

    def _attach_and_start(self) -> None:
        self._attached = _raw_socket(self._api.attach_socket(self._container, params={"stdin": 1, "stream": 1}))
        self._api.start(self._container)

    async def _write(self, path: str, data: bytes) -> None:
        output = _Output(self._limits.max_output_bytes)
        code = await self._collect(["sh", "-c", WRITE_SCRIPT, "sh", path], data, output, timeout_s=_FILE_TIMEOUT_S)
        if code:
            raise file_error(code, path)

    async def _run(self, words: list[str], stdin: bytes, *, timeout_s: float, max_bytes: int) -> ExecResult:
        output, began = _Output(max_bytes), time.monotonic()
        wrapped = ["sh", "-c", _WRAPPER, "sh", *words]
        code = await self._collect(wrapped, b"\n" + stdin, output, timeout_s=timeout_s)
        stderr = decode(bytes(output.streams[_STDERR]))
        note = "rlscale: timed out" if output.is_late else ""
        note += "; the sandbox was restarted, its files are gone" if output.is_restarted else ""
        return ExecResult(
            stdout=decode(bytes(output.streams[_STDOUT])),
            stderr="\n".join(filter(None, (stderr.rstrip("\n"), note))) if note else stderr,
            exit_code=KILLED_CODE if output.is_late or code is None else code,
            timed_out=output.is_late,
            truncated=output.is_cut,
            duration_s=time.monotonic() - began,
        )

    async def _collect(self, words: list[str], stdin: bytes, output: "_Output", *, timeout_s: float) -> int | None:
        """Runs a program until its outputs end; returns its exit code. Any failure stops the sandbox."""
        if not self._container:
            raise SandboxError("the sandbox is not running")
        try:
            return await self._collect_or_kill(words, stdin, output, timeout_s=timeout_s)
        except BaseException as error:
            stopping = self._stopping.is_set()
            self._stopping.set()
            if isinstance(error, OSError) or (stopping and isinstance(error, SandboxError)):
                raise SandboxError("a sandbox ended") from error
            raise

    async def _collect_or_kill(
        self, words: list[str], stdin: bytes, output: "_Output", *, timeout_s: float
    ) -> int | None:
        name, stream = await self._in_thread(lambda: self._open_exec(words))
        reading = asyncio.create_task(_exchange(stream, stdin, output))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((reading, stopping), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                raise SandboxError("a sandbox ended")
            if not reading.done():
                output.is_late = True
                output.is_restarted = await self._kill_programs(reading)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            stopping.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await reading
            stream.close()
        if output.is_restarted:
            return None
        code = (await self._in_thread(lambda: self._api.exec_inspect(name)))["ExitCode"]
        return None if code is None else int(code)

    def _open_exec(self, words: list[str]) -> tuple[str, socket.socket]:
        environment = {"HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        created = self._api.exec_create(
            self._container, words, stdin=True, user=USER, environment=environment, workdir=HOME
        )
        return created["Id"], _raw_socket(self._api.exec_start(created["Id"], socket=True))

    async def _kill_programs(self, reading: "asyncio.Task[None]") -> bool:
        """Kills all programs; returns whether this took a restart, e.g. because they use up the process numbers."""
        with suppress(SandboxError, OSError):
            _, stream = await self._in_thread(lambda: self._open_exec(_KILL))
            stream.close()
            await asyncio.wait((reading,), timeout=_KILL_TIMEOUT_S)
            if reading.done():
                return False
        await self._in_thread(self._restart)
        return True

    def _restart(self) -> None:
        if self._attached is not None:
            self._attached.close()
        self._api.restart(self._container, timeout=0)
        self._attached = _raw_socket(self._api.attach_socket(self._container, params={"stdin": 1, "stream": 1}))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        from docker.errors import DockerException  # imported here, as in `_create`

        try:
            return await asyncio.to_thread(call)
        except (DockerException, OSError) as error:  # those of its HTTP client are OSErrors
            raise SandboxError(_first_line(error)) from error


class _Output:
    """The first bytes of both outputs of a program, and how it ended."""

    def __init__(self, max_bytes: int) -> None:
        self.streams: dict[int, bytearray] = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self.is_cut = self.is_late = self.is_restarted = False
        self._max_bytes = max_bytes

    def add(self, stream: int, content: bytes) -> None:
        kept = self.streams.get(stream, self.streams[_STDOUT])
        free = self._max_bytes - len(kept)
        kept += content[:free]
        self.is_cut = self.is_cut or len(content) > free


async def _exchange(stream: socket.socket, stdin: bytes, output: _Output) -> None:
    """Sends the input of a program and reads its outputs until they end."""
    sending = asyncio.create_task(_send(stream, stdin))
    loop = asyncio.get_running_loop()
    pending = b""
    try:
        while content := await loop.sock_recv(stream, _CHUNK):
            pending += content
            while len(pending) >= _FRAME.size:
                kind, length = _FRAME.unpack_from(pending)
                body = pending[_FRAME.size : _FRAME.size + length]
                output.add(kind, body)
                pending = pending[_FRAME.size + len(body) :]
                # The rest of a long frame is read in parts.
                missing = length - len(body)
                while missing:
                    content = await loop.sock_recv(stream, min(missing, _CHUNK))
                    if not content:
                        return
                    output.add(kind, content)
                    missing -= len(content)
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError):  # a program that does not read its input may end before it
            await sending


async def _send(stream: socket.socket, stdin: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(stream, stdin)
    stream.shutdown(socket.SHUT_WR)


def _raw_socket(opened: Any) -> socket.socket:
    """The connection below what the client returns for a stream."""
    raw: socket.socket = getattr(opened, "_sock", opened)
    copy = raw.dup()
    opened.close()
    copy.setblocking(False)
    return copy


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
