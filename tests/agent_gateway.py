"""A gateway without engines: an OpenAI endpoint whose answers are scripted, and whose sessions record real trees."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlscale.engines.ports import reserve_port
from rlscale.errors import EngineError
from rlscale.protocols import EXHAUSTED_BUDGET, FAILED_CALL
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, SamplingParams


@dataclass(frozen=True)
class FakeAccess:
    """See `SessionAccess`."""

    id: str
    base_url: str
    anthropic_url: str
    api_key: str


@dataclass
class FakeSession:
    """A session and all requests of its key."""

    tree: Trajectory
    max_turns: int | None
    params: SamplingParams
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_known: int = 0  # messages that are in the tree


class StoppableServer(uvicorn.Server):
    """Ends at once, not at the next tick of 0.1 s."""

    is_running = False

    async def main_loop(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self.is_running = True
        await self._stopped.wait()

    def stop(self) -> None:
        """Ends `run`, from another thread."""
        self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._stopped.set)


class FakeGateway:
    """See `AgentGateway`. The server runs in a thread until `stop`.

    Args:
        answer: the text of the answer to the messages of a request.
    """

    def __init__(self, answer: Callable[[list[dict[str, Any]]], str] = lambda messages: "4") -> None:
        self.answer, self.version = answer, 0
        self.open: dict[str, FakeSession] = {}
        self.ended: list[FakeSession] = []
        self.num_dropped = self.num_refused = 0
        self.num_failing = 0  # next requests that no engine answers
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._port = reserve_port("127.0.0.1")
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        config = uvicorn.Config(app, host="127.0.0.1", port=self._port, log_level="warning", lifespan="off")
        self._server = StoppableServer(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> "FakeGateway":
        self._thread.start()
        while not self._server.is_running:
            self._thread.join(0.005)
            assert self._thread.is_alive(), "the server must start"
        return self

    def stop(self) -> None:
        self._server.stop()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def open_session(
        self, trajectory: Trajectory, params: SamplingParams, *, lifetime_s: float, max_turns: int | None = None
    ) -> FakeAccess:
        assert not trajectory.turns and lifetime_s > 0
        key = f"key-{trajectory.id}-{next(self._numbers)}"
        self.open[key] = FakeSession(replace(trajectory, turns=[], metadata={}), max_turns, params)
        return FakeAccess(id=key, base_url=self.url, anthropic_url=self.url.removesuffix("/v1"), api_key=key)

    async def finish(self, session_id: str) -> Trajectory:
        with self._lock:
            session = self.open.pop(session_id, None)
        if session is None:
            raise EngineError("the gateway has no such session")
        self.ended.append(session)
        return session.tree

    async def drop(self, session_id: str) -> None:
        with self._lock:
            self.num_dropped += self.open.pop(session_id, None) is not None

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        key = request.headers["authorization"].removeprefix("Bearer ")
        # An answer that waits must not block the server.
        text = await asyncio.to_thread(self.answer, body["messages"])
        with self._lock:
            session = self.open.get(key)
            if session is None:
                self.num_refused += 1
                return JSONResponse({"error": {"message": "unknown key"}}, status_code=401)
            return self._add(session, body, text)

    def _add(self, session: FakeSession, body: dict[str, Any], text: str) -> Response:
        tree, limit = session.tree, session.max_turns
        if limit is not None and sum(turn.sampled for turn in tree.turns) >= limit:
            tree.metadata.setdefault(EXHAUSTED_BUDGET, "max_turns")
            return JSONResponse({"error": {"message": "no turns left"}}, status_code=400)
        if self.num_failing:
            self.num_failing -= 1
            tree.metadata[FAILED_CALL] = "EngineError: engine 0 must answer, got nothing"
            return JSONResponse({"error": {"message": "engine 0 must answer"}}, status_code=503)
        tree.metadata.pop(FAILED_CALL, None)
        session.requests.append(body)
        new = "".join(each["content"] for each in body["messages"][session.num_known :])
        if tree.turns:
            tree.extend([ord(each) % 90 for each in new], text=new)
        session.num_known = len(body["messages"]) + 1
        ids = [ord(each) % 90 for each in text]
        answer = Generation(
            output_ids=ids,
            logprobs=[-0.5] * len(ids),
            weight_versions=[self.version] * len(ids),
            finish_reason="stop",
            text=text,
            engine="fake",
        )
        tree.add_generation(answer)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        return JSONResponse({**head, "choices": [choice]})
