"""Requests that are wrong are refused by the HTTP server of engines, and never a failure of it."""

import json
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from rlscale.engines.fake import FakeServer
from rlscale.engines.server.http_server import Server

KEY = "secret"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer(api_key=KEY) as server:
        yield server


def send(
    fake: FakeServer, path: str, body: bytes, *, key: bytes = KEY.encode(), more: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of the answer; bytes, because clients send only valid headers."""
    parts = urlsplit(fake.url)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n" % (path.encode(), key)
    head += more + b"Connection: close\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with connection.makefile("rb") as answer:
            head, _, content = answer.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), content


@pytest.mark.parametrize("key", [b"wrong", "\u00e9".encode(), b"\xff\xfe"])
def test_a_wrong_key_is_refused(fake: FakeServer, caplog: pytest.LogCaptureFixture, key: bytes) -> None:
    with caplog.at_level(logging.ERROR):
        status, _ = send(fake, "/generate", b"{}", key=key)
    assert status == 401
    assert not caplog.records


def test_web_pages_are_refused() -> None:
    # A browser sends a text of any page to loopback, where a server needs no key.
    page = b"Origin: http://evil.example\r\nContent-Type: text/plain\r\n"
    with FakeServer() as open_to_all:
        status, content = send(open_to_all, "/pause_generation", b"{}", more=page)
        assert status == 403 and "web pages" in json.loads(content)["error"]["message"]
        assert send(open_to_all, "/pause_generation", b"{}")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", b"[" * 100_000, "body"),
        ("/generate", b"{", "body"),
        ("/generate", b'{"input_ids": [5], "sampling_params": {"stop": "\\ud800"}}', "sampling_params.stop"),
        ("/release_memory_occupation", b'{"tags": [["weights"]]}', "tags"),
    ],
)
def test_a_wrong_body_is_refused(
    fake: FakeServer, caplog: pytest.LogCaptureFixture, path: str, body: bytes, field: str
) -> None:
    with caplog.at_level(logging.ERROR):
        status, content = send(fake, path, body)
    assert status == 400
    assert json.loads(content)["error"]["field"] == field
    assert not caplog.records


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    server = Server(web.Application(), host="::1", port=0)
    server._runner = SimpleNamespace(addresses=[("::1", 30000, 0, 0)])  # type: ignore[assignment]
    assert server.url == "http://[::1]:30000"  # a machine may have no IPv6


@pytest.mark.parametrize("number", [10_001, 10**9])
def test_more_answers_than_memory_has_are_refused(fake: FakeServer, number: int) -> None:
    status, content = send(fake, "/generate", b'{"input_ids": [5], "sampling_params": {"n": %d}}' % number)
    assert status == 400
    assert b"sampling_params.n must be at most 10000" in content
