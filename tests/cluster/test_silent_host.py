"""Calls to a server whose host loses its power: the client gets no packet that ends the connection."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlscale.crashtest.namespaces import Network, Node
from tests.cluster.conftest import NEEDS_NAMESPACES

pytestmark = NEEDS_NAMESPACES

SILENCE_S = 4  # the shortest that the kernel can do

SERVER = """
import asyncio, sys

async def answer(reader, writer):
    while line := await reader.readline():
        if line == b"\\r\\n":
            print("request", flush=True)
            if sys.argv[1] == "answers":
                writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")

async def main():
    server = await asyncio.start_server(answer, "0.0.0.0", 8000)
    print("up", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""

CLIENT = """
import asyncio, sys
from rlscale.engines.client.http_connection import HttpConnection
from rlscale.errors import EngineError
from rlscale.types import EngineAddress

async def main():
    address = EngineAddress(name="engine 0", url="http://{}:8000".format(sys.argv[1]))
    connection = HttpConnection(address, router=address, timeout_s=600, silence_s=int(sys.argv[2]))
    try:
        while True:
            await connection.call("POST", "/pause_generation")
    except EngineError as error:
        print(error)
    await connection.close()

asyncio.run(main())
"""


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Nodes of a client and of a server."""
    with Network() as network:
        yield network.add_node(), network.add_node()


@pytest.mark.parametrize("server", ["computes", "answers"])
def test_a_call_to_a_lost_host_fails_long_before_its_timeout(nodes: tuple[Node, Node], server: str) -> None:
    """Both with a call that waits for its answer, and with one that is sent after the loss."""
    client, lost = nodes
    serving = lost.start([sys.executable, "-c", SERVER, server], output=subprocess.PIPE)
    assert serving.stdout is not None and serving.stdout.readline() == b"up\n"
    calling = client.start([sys.executable, "-c", CLIENT, lost.address, str(SILENCE_S)], output=subprocess.PIPE)
    assert serving.stdout.readline() == b"request\n"
    lost.kill(silently=True)
    output, _ = calling.communicate(timeout=300)  # half of the call's own timeout
    assert b"engine 0 (http://10.77.0.2:8000/pause_generation) must answer, got ClientOSError: [Errno 110]" in output
