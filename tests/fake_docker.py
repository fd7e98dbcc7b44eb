"""Fake of Docker's daemon: the endpoints that sandboxes use, over a Unix socket. Containers are sandboxes of processes.

python -m tests.fake_docker /path/to/docker.sock
"""

import asyncio
import itertools
import json
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import SandboxLimits
from rlscale.sandboxes.subprocess_sandbox import SubprocessSandbox

IMAGE = "python:3.11-slim"
MAX_OUTPUT_BYTES = 32 * 2**20
"""A real daemon passes on any amount."""

KILL = ["sh", "-c", "kill -9 -1"]
_UPGRADED = "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
_UPGRADED += "Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


class Container:
    """A container that a request has created. Its host config sets the limits of its sandbox."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, host = config, config["HostConfig"]
        sizes = re.findall(r"size=(\d+)", host["Tmpfs"]["/sandbox"])
        disk_bytes = int(sizes[0])
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Init"]
        assert host["SecurityOpt"] == ["no-new-privileges"] and host["AutoRemove"]
        assert config["OpenStdin"] and config["StdinOnce"], "the container must end with the run"
        self._limits = SandboxLimits(
            memory_bytes=host["Memory"] - disk_bytes,
            disk_bytes=disk_bytes,
            max_processes=host["PidsLimit"],
            has_network=host["NetworkMode"] != "none",
            max_output_bytes=MAX_OUTPUT_BYTES,
        )
        self.sandbox = SubprocessSandbox(self._limits)
        self.execs: dict[str, dict[str, Any]] = {}

    async def run(self, command: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        """Exit code and outputs; not `exec`, which decodes them."""
        sandbox = self.sandbox
        request = {"kind": "exec", "command": command, "env": sandbox._environment(), "timeout_s": 3600.0}
        async with sandbox._lock:
            reply, output = await sandbox._call(request, stdin, timeout_s=4000.0)
        return reply["exit_code"], output[: reply["stdout_bytes"]], output[reply["stdout_bytes"] :]

    async def restart(self) -> None:
        await self.sandbox.stop()
        self.sandbox = SubprocessSandbox(self._limits)
        await self.sandbox.start()

    def kill_programs(self) -> None:
        """Kills what runs in the sandbox from outside, as `kill` does in a container."""
        for inner in _children(self.sandbox._pid or 0):
            for pid in _children(inner):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Daemon(ThreadingUnixStreamServer):
    """The server; sandboxes live in the event loop of another thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.containers: dict[str, Container] = {}
        self.numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def await_(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def remove(self, name: str) -> None:
        container = self.containers.pop(name, None)
        if container is not None:
            self.await_(container.sandbox.stop())

    def container_of(self, exec_name: str) -> Container | None:
        return next((each for each in self.containers.values() if exec_name in each.execs), None)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Daemon

    def do_GET(self) -> None:
        path = self._path()
        if path == "/version":
            self._reply({"ApiVersion": "1.45", "MinAPIVersion": "1.24", "Version": "fake"})
        elif found := re.fullmatch(r"/exec/(\w+)/json", path):
            container = self.server.container_of(found[1])
            self._missing() if container is None else self._reply(container.execs[found[1]])
        elif path == "/containers/json":
            self._reply(
                [{"Id": name, "Labels": each.config["Labels"]} for name, each in self.server.containers.items()]
            )
        else:
            self._missing()

    def do_DELETE(self) -> None:
        self.server.remove(self._path().split("/")[2])
        self._reply(None, status=204)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        given = json.loads(body) if body.strip() not in (b"", b"null") else {}
        path = self._path()
        if path == "/containers/create":
            return self._create(given)
        _, kind, name, action = path.split("/")
        container = self.server.containers.get(name) if kind == "containers" else self.server.container_of(name)
        if container is None:
            return self._missing()
        if action == "attach":
            self._upgrade()
            first = container.sandbox
            self.rfile.read()  # until the client closes its end
            if container.sandbox is first:  # not restarted since
                self.server.remove(name)
        elif action == "exec":
            number = f"e{next(self.server.numbers)}"
            container.execs[number] = {"ID": number, "Running": False, "ExitCode": None, "config": given}
            self._reply({"Id": number}, status=201)
        elif kind == "exec":
            self._run(container, container.execs[name])
        else:
            self.server.await_(container.restart() if action == "restart" else container.sandbox.start())
            self._reply(None, status=204)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def address_string(self) -> str:
        return "client"  # connections of a Unix socket have no address

    def _create(self, config: dict[str, Any]) -> None:
        if config["Image"] != IMAGE:
            return self._reply({"message": f"No such image: {config['Image']}"}, status=404)
        name = f"c{next(self.server.numbers)}"
        self.server.containers[name] = Container(config)
        self._reply({"Id": name, "Warnings": []}, status=201)

    def _run(self, container: Container, state: dict[str, Any]) -> None:
        config = state["config"]
        assert config["User"] == "65534:65534" and config["AttachStdin"]
        self._upgrade()
        if config["Cmd"] == KILL:
            container.kill_programs()
            return
        stdin = self.rfile.read()
        env = dict(each.split("=", 1) for each in config["Env"])
        assert env["HOME"] == "/sandbox"
        try:
            code, *outputs = self.server.await_(container.run(config["Cmd"], stdin))
        except SandboxError:  # removed or restarted
            return
        state["ExitCode"] = code
        for stream, content in enumerate(outputs, start=1):
            for start in range(0, len(content), 1 << 15):
                part = content[start : start + (1 << 15)]
                self.wfile.write(struct.pack(">BxxxI", stream, len(part)) + part)

    def _upgrade(self) -> None:
        self.close_connection = True
        self.wfile.write(_UPGRADED.encode())

    def _path(self) -> str:
        return re.sub(r"^/v[\d.]+", "", self.path.split("?")[0])

    def _reply(self, content: Any, *, status: int = 200) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self) -> None:
        self._reply({"message": "no such container or exec"}, status=404)


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    with Daemon(sys.argv[1]) as daemon:
        print("ready", flush=True)
        daemon.serve_forever()
