"""An HTTP proxy in a separate process, which knows other names than the resolver and writes what it forwards.

`python -m tests.forward_proxy name=127.0.0.1:port ...` prints its URL, and then a line for each request.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = Path(__file__).parents[1]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, targets: Mapping[str, str]) -> None:
    """One request of a connection: the proxy closes it after the answer, and does not say so, as tinyproxy."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, url, version = head.splitlines()[0].split()
    sys.stdout.write(f"{method} {url}\n")
    sys.stdout.flush()
    parts = urlsplit(url)
    host, _, port = targets[parts.hostname or ""].partition(":")
    there, back = await asyncio.open_connection(host, int(port))
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    kept = [line for line in head.splitlines()[1:] if line and not line.lower().startswith(("connection", "proxy-"))]
    back.write("\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""]).encode())
    sending = asyncio.create_task(_copy(reader, back))
    answer = (await there.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    writer.write("\r\n".join(line for line in answer if not line.lower().startswith("connection:")).encode())
    await _copy(there, writer)
    sending.cancel()


async def _serve(targets: Mapping[str, str]) -> None:
    server = await asyncio.start_server(lambda *streams: _forward(*streams, targets), "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@dataclass(frozen=True, kw_only=True)
class ForwardProxy:
    """A running proxy."""

    url: str
    log: Path

    @property
    def requests(self) -> list[str]:
        return self.log.read_text().splitlines()[1:]


@contextmanager
def forward_proxy(folder: Path, targets: Mapping[str, str]) -> Iterator[ForwardProxy]:
    """Args:
    targets: address of each name that the proxy knows.
    """
    log = folder / "proxy.log"
    words = [f"{name}={address}" for name, address in targets.items()]
    with log.open("w") as file:
        command = [sys.executable, "-m", "tests.forward_proxy", *words]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=subprocess.DEVNULL)
    try:
        while not log.read_text().endswith("\n"):
            assert process.poll() is None, "the proxy must start"
        yield ForwardProxy(url=log.read_text().strip(), log=log)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(_serve(dict(word.split("=") for word in sys.argv[1:])))
