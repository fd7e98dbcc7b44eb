"""Clients of the gateway that disconnect, in this process."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from rlscale.engines.fake import FakeServer
from rlscale.gateway.chat_handlers import RETRY_COUNT
from rlscale.gateway.engine_calls import GenerateCalls
from rlscale.gateway.gateway_app import GatewaySettings, build_gateway_app
from rlscale.gateway.session import Session
from rlscale.types import EngineAddress
from tests.gateway_codec import VOCAB_SIZE, build_codec
from tests.unit.gateway.test_session import make_spec

ADMIN = "admin"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}


@dataclass
class Client:
    """One request. `gone` is set when its client disconnects; `num_chunks` are read before that."""

    app: ASGIApp
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    num_chunks: int | None = None
    is_read: asyncio.Event = field(default_factory=asyncio.Event)  # set when the server waits for the body
    sends: asyncio.Event | None = None  # when the body is sent; None: at once
    sent: list[Message] = field(default_factory=list)

    async def post(self, path: str, body: Any, key: str, **headers: str) -> Any:
        received: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Message:
            self.is_read.set()
            if self.sends is not None:
                await self.sends.wait()
            if received:
                return received.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)
            if self.num_chunks is not None and len(self.sent) > self.num_chunks:
                self.gone.set()
                await asyncio.Event().wait()  # the buffers of the connection stay full

        given = {"authorization": f"Bearer {key}", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # as uvicorn
            "method": "POST",
            "path": path,
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "server": ("127.0.0.1", 1),
        }
        await self.app(scope, receive, send)
        return None if self.gone.is_set() or "stream" in body else json.loads(self.content)

    @property
    def content(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Any, str, str]]:
    """The application, a session in it, and the key of the session."""
    with FakeServer(vocab_size=VOCAB_SIZE) as fake:
        engines = [EngineAddress(name="engine 0", url=fake.url)]
        settings = GatewaySettings(folder=folder, model="m", engines=engines, admin_key=ADMIN, secret=b"s" * 32)
        app = build_gateway_app(settings, build_codec())
        async with app.router.lifespan_context(app):
            session = await Client(app).post("/sessions", make_spec().to_json(), ADMIN)
            yield app, session["id"], session["api_key"]


async def finish(app: ASGIApp, session_id: str) -> int:
    """The number of calls of a session."""
    record = await Client(app).post(f"/sessions/{session_id}/finish", {}, ADMIN)
    number = record["metadata"]["num_calls"]
    assert isinstance(number, int)
    return number


def slow_down(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[asyncio.Event, threading.Event]:
    """Makes a method of sessions set the first event, and wait for the second one."""
    method, started, may_end = getattr(Session, name), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(self: Session, *arguments: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(10)
        return method(self, *arguments, **options)

    monkeypatch.setattr(Session, name, slow)
    return started, may_end


async def test_a_repetition_waits_for_the_record_of_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = slow_down(monkeypatch, "commit")
    async with opened(tmp_path) as (app, session_id, key), asyncio.timeout(20):
        first = Client(app)
        lost = asyncio.create_task(first.post(CHAT, BODY, key))
        await started.wait()
        first.gone.set()
        again = asyncio.create_task(Client(app).post(CHAT, BODY, key, **{RETRY_COUNT: "1"}))
        await asyncio.sleep(0.1)  # only a repetition that does not wait needs the time
        may_end.set()
        answer = await again
        assert await lost is None and answer["object"] == "chat.completion"
        assert await finish(app, session_id) == 1


async def test_a_repetition_waits_for_a_first_request_whose_connection_broke_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = slow_down(monkeypatch, "prepare")
    async with opened(tmp_path) as (app, session_id, key), asyncio.timeout(20):
        first = asyncio.create_task(Client(app).post(CHAT, BODY, key))
        await started.wait()
        again = asyncio.create_task(Client(app).post(CHAT, BODY, key, **{RETRY_COUNT: "1"}))
        await asyncio.sleep(0.1)  # only a repetition that does not wait needs the time
        may_end.set()
        assert (await again)["choices"] == (await first)["choices"]
        assert await finish(app, session_id) == 1


async def test_a_repetition_is_answered_if_the_first_request_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = slow_down(monkeypatch, "prepare")
    async with opened(tmp_path) as (app, session_id, key), asyncio.timeout(20):
        lost = Client(app)
        first = asyncio.create_task(lost.post(CHAT, BODY, key))
        await started.wait()
        again = asyncio.create_task(Client(app).post(CHAT, BODY, key, **{RETRY_COUNT: "1"}))
        await asyncio.sleep(0.1)  # the repetition waits for the first request
        lost.gone.set()
        may_end.set()
        assert (await again)["choices"]
        await first
        assert await finish(app, session_id) == 1


async def test_a_repetition_gets_the_answer_of_a_stream_that_was_cut(tmp_path: Path) -> None:
    body = {**BODY, "stream": True}
    async with opened(tmp_path) as (app, session_id, key), asyncio.timeout(20):
        cut = Client(app, num_chunks=2)
        await cut.post(CHAT, body, key)
        again = Client(app)
        await again.post(CHAT, body, key, **{RETRY_COUNT: "1"})
        assert b"[DONE]" in again.content and b"[DONE]" not in cut.content
        assert await finish(app, session_id) == 1


async def test_a_request_whose_session_ends_while_its_body_is_read_reaches_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(GenerateCalls, "generate", lambda _, session_id, *args, **options: asked.append(session_id))
    async with opened(tmp_path) as (app, session_id, key), asyncio.timeout(20):
        client = Client(app, sends=asyncio.Event())
        late = asyncio.create_task(client.post(CHAT, BODY, key))
        await client.is_read.wait()
        await Client(app).post(f"/sessions/{session_id}/finish", {}, ADMIN)
        client.sends.set()
        assert (await late)["error"]["code"] == "session_ended" and not asked
