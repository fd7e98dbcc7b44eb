"""Addresses of hosts, and the reasons of calls that do not reach them."""

import socket
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver

from rlscale.hosts import describe_call_error

TIMEOUT = aiohttp.ClientTimeout(total=10)


class NoNames(AbstractResolver):
    """A resolver that knows no name, whatever the network of the machine answers."""

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def close(self) -> None:
        pass


async def describe(url: str, *, proxy: str | None = None) -> str:
    connector = aiohttp.TCPConnector(resolver=NoNames())
    async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as session:
        with pytest.raises(aiohttp.ClientError) as raised:
            await session.get(url, proxy=proxy)
    return describe_call_error(raised.value)


async def test_the_reason_and_the_address_are_named() -> None:
    assert await describe("http://127.0.0.1:9/x") == "connection refused at 127.0.0.1:9"
    proxied = await describe("http://engine.test:30000/x", proxy="http://127.0.0.1:9")
    assert proxied == "connection refused at the proxy 127.0.0.1:9"
    assert await describe("http://engine.test:80/x") == "name or service not known at engine.test:80"


def test_other_errors_keep_their_text() -> None:
    assert describe_call_error(ConnectionResetError("by peer")) == "ConnectionResetError: by peer"
    assert describe_call_error(TimeoutError()) == "TimeoutError"
