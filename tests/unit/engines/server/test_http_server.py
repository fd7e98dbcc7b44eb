"""Clients that send nothing more keep no other client from being served."""

import asyncio
import gc
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from aiohttp import ClientSession, web

from rlscale.cli import buffer
from rlscale.engines.middleware_router import serve_router
from rlscale.engines.server.http_server import Server, exclude_startup_objects
from rlscale.gateway import serve_gateway

NUM_OPEN = 64
"""Connections of a process with the limit below: more than it may have."""


@pytest.fixture
def low_limit() -> Iterator[int]:
    """The hard limit of open files of this process, whose soft limit is low."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(len(taken) + NUM_OPEN + 1) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[NUM_OPEN], hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_clients_that_never_finish_their_request_header_do_not_block_others(low_limit: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(7)

    app = web.Application()
    app.router.add_get("/", answer)
    server = Server(app, host="127.0.0.1", port=0)
    await server.start()
    running = asyncio.create_task(server.run())
    await asyncio.sleep(0)
    async with asyncio.timeout(20), ClientSession() as client:
        with ExitStack() as stack:
            for _ in range(NUM_OPEN):
                _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
                stack.callback(writer.close)
                writer.write(b"GET / HTTP/1.1\r\nX: ")
            async with client.get(server.url) as response:
                assert await response.json() == 7
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("name", ["buffer", "router", "gateway"])
@pytest.mark.slow
def test_every_server_allows_as_many_connections_as_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low_limit: int, name: str
) -> None:
    found: list[int] = []

    def run(self: uvicorn.Server | None = None, sockets: object = None) -> None:
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    (tmp_path / "arguments.json").write_text(f'{{"working_folder": "{tmp_path}"}}')
    monkeypatch.setattr(serve_router.gc, "set_threshold", lambda *sizes: None)
    monkeypatch.setattr("sys.argv", ["server", "arguments.json"])
    for module in (serve_router, serve_gateway):
        monkeypatch.setattr(module, "build_server", lambda *args, **options: uvicorn.Server(uvicorn.Config("a:b")))
    for variable in (serve_gateway.ADMIN_KEY_VARIABLE, serve_gateway.SECRET_VARIABLE):
        monkeypatch.setenv(variable, "x")
    monkeypatch.setenv(serve_gateway.ENGINE_KEY_VARIABLE, "{}")
    if name == "buffer":
        assert buffer.main(["--port", "0"]) == 0
    else:
        (serve_router if name == "router" else serve_gateway).main()
    assert found == [low_limit]


@pytest.mark.slow
def test_objects_of_the_start_do_not_delay_collections() -> None:
    def count(phase: str, info: dict[str, Any]) -> None:
        generations.append(info["generation"])

    generations: list[int] = []
    startup: list[list[int]] = [[] for _ in range(500_000)]
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's defaults
    try:
        gc.collect()
        exclude_startup_objects()
        gc.callbacks.append(count)
        later: list[list[int]] = [[] for _ in range(100_000)]
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*before)
    assert 2 in generations, f"no full collection next to {len(startup)} and {len(later)} objects"
