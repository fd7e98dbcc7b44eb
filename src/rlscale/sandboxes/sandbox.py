"""Sandbox: a place with separate files in which programs run that must not reach anything else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

CODE_FILE = "main.py"
"""File in the sandbox's folder that `exec(code=...)` writes and runs."""

KILLED_CODE = 137
"""Exit code of a program that was killed, as shells report it: 128 + SIGKILL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """Result of one program. Bytes that are no UTF-8 are replaced.

    Example:
        ExecResult(stdout="2\\n", stderr="", exit_code=0, duration_s=0.02)
    """

    stdout: str
    stderr: str
    exit_code: int  # 128 + number of the signal for a program that a signal ended
    timed_out: bool = False
    truncated: bool = False  # an output was longer than `max_output_bytes`; its first bytes are kept
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Limits of one sandbox."""

    timeout_s: float = 10.0  # of a call that names none
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 256 * 2**20
    max_output_bytes: int = 64 * 2**10  # kept of each of the two outputs of a program
    max_processes: int = 64
    has_network: bool = False


@runtime_checkable
class Sandbox(Protocol):
    """One sandbox. Programs run one after another; each ends with all processes that it has started.

    A program that fails, crashes or exceeds a limit is a result. SandboxError means that the sandbox itself failed: it
    is of no more use, and the trajectory fails with the cause `sandbox`. A call that is cancelled stops the sandbox.

    Example:
        async with open_sandbox(config) as sandbox:
            result = await sandbox.exec(code="print(1 + 1)")
    """

    async def start(self) -> None:
        """Raises SandboxError with the reason if the sandbox cannot start."""
        ...

    async def exec(
        self,
        command: str | Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Runs a command of a shell, a program with its arguments, or Python code, in the sandbox's folder."""
        ...

    async def read(self, path: str) -> bytes:
        """Returns a file. Relative paths start in the sandbox's folder. Raises OSError like `open`."""
        ...

    async def write(self, path: str, data: str | bytes) -> None:
        """Writes a file and creates its folders. Raises OSError like `open`."""
        ...

    async def stop(self) -> None:
        """Ends all programs and deletes all files. May be called twice, and while a program runs."""
        ...


def command_of(command: str | Sequence[str] | None, code: str | None, *, python: str) -> list[str]:
    """The program and arguments of a call. Raises ValueError unless exactly one of command and code is given."""
    if (command is None) == (code is None):
        raise ValueError("exec takes either a command or code")
    if code is not None:
        return [python, CODE_FILE]
    if isinstance(command, str):
        return ["sh", "-c", command]
    words = list(command or ())
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ValueError(f"the command of exec must be a text or a non-empty list of texts, got {command!r}")
    return words


def encode(data: str | bytes) -> bytes:
    # A model may write half of a surrogate pair, which is no UTF-8.
    return data.encode(errors="surrogatepass") if isinstance(data, str) else bytes(data)


def decode(data: bytes | bytearray) -> str:
    return data.decode(errors="replace")
