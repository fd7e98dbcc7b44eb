"""Sandbox of a SandboxFusion service, over its HTTP API."""

import asyncio
import base64
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import CODE_FILE, KILLED_CODE, ExecResult, SandboxLimits, command_of, decode, encode
from rlscale.sandboxes.shell_files import READ_SCRIPT, WRITE_SCRIPT, file_error

PYTHON = "python3"
_FILE_TIMEOUT_S = 60.0
_GRACE_S = 10.0  # to pack the files; then the service kills the script, too
_EXTRA_S = 40.0  # for the queue of the service, after the timeout of a program
_START_TIMEOUT_S = 60.0
_STATE, _STDIN, _DATA, _CODE = ".rlscale_state", ".rlscale_stdin", ".rlscale_data", ".rlscale_code"
_LATE_CODE = 199  # of a program that the script killed at its deadline

# Unpacks the files of earlier calls, runs the program, passes on the first bytes of its outputs and packs the files.
# Only the program's process group is killed: the service may run other programs as the same user.
_SCRIPT = """
if [ -f {state} ]; then tar xf {state} && rm {state} || exit 125; fi
if [ -f {code_file} ]; then mv {code_file} {program_file}; fi
limit() {{ stdbuf -o0 head -c {limit}; cat > /dev/null; }}
mkfifo .rlscale_out .rlscale_err .rlscale_timer
exec 3>&2 2> /dev/null  # not the shell's messages about killed jobs
set -m
limit < .rlscale_out &
out=$!
limit < .rlscale_err >&3 &
err=$!
{command} < {stdin} > .rlscale_out 2> .rlscale_err 3>&- &
program=$!
(read -t {timeout_s} _ <> .rlscale_timer; touch .rlscale_late; kill -9 -- -$program) > /dev/null 3>&1 &
timer=$!
set +m
wait $program
code=$?
kill -9 -- -$program -$timer
# A process that left the group may have the outputs.
for i in 1 2 3 4 5 6 7 8 9 10; do
  kill -0 $out $err && sleep 0.05
done
kill -9 -- -$out -$err
tar cf {state} --exclude './.rlscale_*' . || {{ rm -f {state}; echo 'rlscale: the files do not fit' >&3; }}
[ ! -f .rlscale_late ] || exit {late_code}
exit $code
"""


class FusionSandbox:
    """A `Sandbox` of a SandboxFusion service.

    The service keeps nothing between two programs, so that all files travel with each call. Processes, memory and
    network are limited as the service is configured.

    Args:
        url: of the service, e.g. `http://10.0.0.1:8080`.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, url: str) -> None:
        self._limits, self._url = limits or SandboxLimits(), url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._state: bytes | None = None  # all files, as a tar archive
        self._lock = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> "FusionSandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """See `Sandbox`. Runs a program, because the service may answer and have no workers."""
        if self._session is not None or self._stopping.is_set():
            raise SandboxError("a sandbox starts once")
        self._session = aiohttp.ClientSession()
        try:
            result = await self.exec("echo ready", timeout_s=_START_TIMEOUT_S)
        except SandboxError as error:
            await self.stop()
            raise SandboxError(f"a sandbox of SandboxFusion did not start: {error}") from error
        if result.stdout != "ready\n":
            await self.stop()
            raise SandboxError(f"a sandbox of SandboxFusion did not start: {result.stderr.strip()[-200:]}")

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
        files = {} if code is None else {_CODE: encode(code)}
        timeout_s = self._limits.timeout_s if timeout_s is None else timeout_s
        async with self._lock:
            return await self._run(words, files, encode(stdin), timeout_s=timeout_s)

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        words = ["sh", "-c", f"({READ_SCRIPT}) > {_DATA}", "sh", path]
        async with self._lock:
            run = await self._post(words, {_STDIN: b""}, timeout_s=_FILE_TIMEOUT_S, fetched=[_DATA])
        if code := run["run_result"].get("return_code"):
            raise file_error(code, path)
        return _decoded(run, _DATA)

    async def write(self, path: str, data: str | bytes) -> None:
        """See `Sandbox`."""
        words = ["sh", "-c", WRITE_SCRIPT, "sh", path]
        async with self._lock:
            result = await self._run(words, {}, encode(data), timeout_s=_FILE_TIMEOUT_S)
        if result.exit_code:
            raise file_error(result.exit_code, path)

    async def stop(self) -> None:
        """See `Sandbox`. A program that runs ends at its deadline: the service has no call to end it."""
        self._stopping.set()
        self._state = None
        async with self._lock:
            if self._session is not None:
                await self._session.close()
                self._session = None

    async def _run(self, words: list[str], files: Mapping[str, bytes], stdin: bytes, *, timeout_s: float) -> ExecResult:
        began = time.monotonic()
        run = await self._post(words, {**files, _STDIN: stdin}, timeout_s=timeout_s, fetched=[_STATE])
        found = run["run_result"]
        code = found.get("return_code")
        is_late = found["status"] == "TimeLimitExceeded" or code == _LATE_CODE
        if _STATE in run.get("files", {}):
            self._state = _decoded(run, _STATE)
        limit = self._limits.max_output_bytes
        stdout, stderr = (encode(found.get(name) or "") for name in ("stdout", "stderr"))
        text = decode(stderr[:limit])
        return ExecResult(
            stdout=decode(stdout[:limit]),
            stderr="\n".join(filter(None, (text.rstrip("\n"), "rlscale: timed out"))) if is_late else text,
            exit_code=KILLED_CODE if is_late or code is None else code if code >= 0 else 128 - code,
            timed_out=is_late,
            truncated=len(stdout) > limit or len(stderr) > limit,
            duration_s=time.monotonic() - began,
        )

    async def _post(
        self, words: list[str], files: Mapping[str, bytes], *, timeout_s: float, fetched: list[str]
    ) -> dict[str, Any]:
        """Runs a program; returns the service's answer, which has a `run_result`. Any failure stops the sandbox."""
        if self._session is None or self._stopping.is_set():
            raise SandboxError("the sandbox is not running")
        sent = dict(files) if self._state is None else {**files, _STATE: self._state}
        limit = self._limits.max_output_bytes + 1  # one more shows that the output was longer
        script = _SCRIPT.format(
            state=_STATE,
            stdin=_STDIN,
            code_file=_CODE,
            program_file=CODE_FILE,
            limit=limit,
            timeout_s=timeout_s,
            late_code=_LATE_CODE,
            command=shlex.join(words),
        )
        request = {
            "code": script,
            "language": "bash",
            "run_timeout": timeout_s + _GRACE_S,
            "files": {name: base64.b64encode(content).decode() for name, content in sent.items()},
            "fetch_files": fetched,
        }
        posting = asyncio.create_task(self._request(request, timeout_s=timeout_s))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((posting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not posting.done():
                raise SandboxError("a sandbox ended")
            return posting.result()
        except BaseException:
            self._stopping.set()
            raise
        finally:
            posting.cancel()
            stopping.cancel()

    async def _request(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s + _EXTRA_S)
        try:
            async with self._session.post(f"{self._url}/run_code", json=request, timeout=timeout) as response:
                content = await self._receive(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SandboxError(f"{self._url}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise SandboxError(f"{self._url}: status {response.status}: {decode(content[:200])}")
        try:
            answer = json.loads(content)
            if answer["status"] == "SandboxError":
                raise SandboxError(f"{self._url}: {str(answer.get('message'))[:200]}")
            assert answer["run_result"]["status"]
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise SandboxError(f"{self._url}: not an answer of SandboxFusion: {decode(content[:200])}") from error
        return dict(answer)

    async def _receive(self, response: aiohttp.ClientResponse) -> bytes:
        """The body, unless it is longer than all files and outputs together may be."""
        limits, content = self._limits, bytearray()
        # An archive in base64, and outputs with escapes of up to six characters.
        longest = 2 * limits.disk_bytes + 12 * limits.max_output_bytes + 2**16
        async for part in response.content.iter_chunked(1 << 16):
            content += part
            if len(content) > longest:
                raise SandboxError(f"{self._url}: the answer is longer than {longest} bytes")
        return bytes(content)


def _decoded(run: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(run["files"][name])
    except (KeyError, ValueError) as error:
        raise SandboxError(f"the service returned no file {name}") from error
