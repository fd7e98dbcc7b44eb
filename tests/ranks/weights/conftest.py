"""Engines as processes, for the tests of weight transports."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.types import EngineAddress

SERVER = Path(__file__).with_name("receiver_server.py")
TIMEOUT_S = 200.0  # tests count half of it as at once, also on a busy machine

StartEngine = Callable[..., EngineAddress]


@contextmanager
def engine_processes() -> Iterator[StartEngine]:
    processes: list[subprocess.Popen[str]] = []

    def start(name: str = "engine 0", fault: str = "") -> EngineAddress:
        command = [sys.executable, str(SERVER), *([fault] if fault else [])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        # The server prints its URL once it listens.
        return EngineAddress(name=name, url=process.stdout.readline().strip())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with engine_processes() as start:
        yield start


@pytest.fixture(scope="module")
def healthy() -> Iterator[EngineAddress]:
    """An engine without faults, for every test that leaves it healthy."""
    with engine_processes() as start:
        yield start("engine 0")


@pytest.fixture(scope="module")
def second() -> Iterator[EngineAddress]:
    """A second engine without faults."""
    with engine_processes() as start:
        yield start("engine 1")


@pytest.fixture(scope="module")
def stale() -> Iterator[EngineAddress]:
    """An engine that acknowledges versions and ignores them."""
    with engine_processes() as start:
        yield start("engine 1", "stale_version")


def checksums_of(address: EngineAddress) -> dict[str, str]:
    async def request() -> dict[str, str]:
        engine = HttpEngine(address, timeout_s=TIMEOUT_S)
        try:
            return dict((await engine.checksums())[0].checksums)
        finally:
            await engine.close()

    return asyncio.run(request())
