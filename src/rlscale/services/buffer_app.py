"""HTTP endpoints of the rollout buffer.

POST /trajectories    a trajectory or a list of them        producers
GET  /task            what the run announces: engines, sampling parameters, limits
POST /groups/next     the next groups of a run's log        the run
POST /groups/again    groups of its log, by position
GET  /status          numbers of groups
GET  /health          answers without a key
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlscale.services.buffer_store import BufferStore, ReaderError, StoredGroup
from rlscale.services.trajectory_record import (
    MAX_GROUP_SIZE,
    Name,
    SubmissionError,
    TrajectoryRecord,
    describe_error,
    parse_submission,
)

MAX_BODY_BYTES = 256 * 2**20
MAX_WAIT_S = 30.0
MAX_GROUPS = 10_000

M = TypeVar("M", bound=BaseModel)
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]  # scope, receive, send


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TaskAnnouncement(_Request):
    """Announcement of a run to the producers of a task. It is kept in memory; the run repeats it."""

    task_type: Name
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]
    vocab_size: Annotated[int, Field(ge=1)] | None = None  # None: unknown
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # of prompt and response; None: no limit
    engines: list[dict[str, Any]] = Field(default_factory=list)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    prompt_data: str | None = None


class NextGroups(_Request):
    """A run asks for the next groups."""

    reader: Name
    task: TaskAnnouncement
    position: Annotated[int, Field(ge=0)]
    number: Annotated[int, Field(ge=1, le=MAX_GROUPS)]
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0


class GroupsAgain(_Request):
    """A run asks for groups that it has read before."""

    reader: Name
    positions: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_GROUPS)]


class KeyCheck:
    """Refuses requests without the key; those of web pages, which a browser sends to loopback, too."""

    def __init__(self, app: AsgiApp, *, api_key: str | None) -> None:
        self._app, self._api_key = app, api_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refuse(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refuse(self, scope: Any) -> Response | None:
        headers = dict(scope["headers"])
        if b"origin" in headers:
            return _error("requests of web pages are refused", 403)
        if self._api_key is None or scope["path"] == "/health":
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            return None
        return _error("the header Authorization must have the key of the buffer as bearer token", 401)


def build_buffer_app(store: BufferStore, *, api_key: str | None = None) -> FastAPI:
    """The application over an open file. With `api_key` all requests but `/health` need it as bearer token."""
    # The pages of the documentation would load scripts from another host.
    app = FastAPI(title="rlscale rollout buffer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(KeyCheck, api_key=api_key)
    app.add_exception_handler(SubmissionError, lambda _, error: _error(str(error), getattr(error, "status", 422)))
    app.add_exception_handler(ReaderError, lambda _, error: _error(str(error), 409))
    handlers = _BufferHandlers(store)
    app.get("/health")(handlers.health)
    app.post("/trajectories")(handlers.submit)
    app.get("/task")(handlers.task)
    app.get("/status")(handlers.status)
    app.post("/groups/next")(handlers.next_groups)
    app.post("/groups/again")(handlers.groups_again)
    return app


class _BufferHandlers:
    def __init__(self, store: BufferStore) -> None:
        self._store = store
        self._tasks: dict[str, tuple[TaskAnnouncement, float]] = {}  # with the time of the announcement
        self._submitted = asyncio.Condition()

    async def health(self) -> Response:
        return Response(status_code=200)

    async def submit(self, request: Request) -> Response:
        body = await _read_body(request)
        records = await run_in_threadpool(parse_submission, body)
        for index, record in enumerate(records):
            self._check_task(record, f"[{index}]." if len(records) > 1 else "")
        num_new = await run_in_threadpool(self._store.submit, records)
        async with self._submitted:
            self._submitted.notify_all()
        return JSONResponse({"accepted": len(records), "new": num_new})

    async def task(self, task_type: str = "math") -> Response:
        announced = self._tasks.get(task_type)
        if announced is None:
            return _error(f"no run has announced the task {task_type!r} yet; repeat the request", 404)
        task, time_s = announced
        return JSONResponse({**task.model_dump(), "age_s": round(time.monotonic() - time_s, 1)})

    async def status(self, task_type: str = "math") -> Response:
        announced = self._tasks.get(task_type)
        size = announced[0].group_size if announced else 0
        counts = await run_in_threadpool(self._store.count, task_type, size=size)
        return JSONResponse({name: getattr(counts, name) for name in counts.__slots__})

    async def next_groups(self, request: Request) -> Response:
        query = _parse(NextGroups, await _read_body(request))
        self._tasks[query.task.task_type] = query.task, time.monotonic()
        deadline_s = time.monotonic() + query.wait_s
        while True:
            async with self._submitted:
                groups = await run_in_threadpool(
                    self._store.next_groups,
                    query.reader,
                    task=query.task.task_type,
                    size=query.task.group_size,
                    position=query.position,
                    number=query.number,
                )
                left_s = deadline_s - time.monotonic()
                if groups or left_s <= 0 or await request.is_disconnected():
                    return _reply(groups)
                try:
                    await asyncio.wait_for(self._submitted.wait(), left_s)
                except TimeoutError:
                    return _reply([])

    async def groups_again(self, request: Request) -> Response:
        query = _parse(GroupsAgain, await _read_body(request))
        return _reply(await run_in_threadpool(self._store.groups_at, query.reader, query.positions))

    def _check_task(self, record: TrajectoryRecord, place: str) -> None:
        """Raises SubmissionError for a trajectory that does not fit the run of its task."""
        if record.task_type not in self._tasks:
            return
        task, _ = self._tasks[record.task_type]
        if record.group_size != task.group_size:
            raise SubmissionError(
                f"{place}group_size must be {task.group_size}, the run's batch.n_samples_per_prompt, got "
                f"{record.group_size}"
            )
        if task.vocab_size is not None and record.highest_token >= task.vocab_size:
            raise SubmissionError(
                f"{place}token ids must be below {task.vocab_size}, the size of the run's vocabulary, got "
                f"{record.highest_token}"
            )
        if task.max_tokens is not None and record.num_tokens > task.max_tokens:
            raise SubmissionError(
                f"{place}prompt and response must have at most {task.max_tokens} tokens, got {record.num_tokens}; "
                "shorten it, or send status failed without a response"
            )


def _parse(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise SubmissionError(describe_error(error.errors(include_url=False)[0])) from None


async def _read_body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        SubmissionError: it is too large, or is not sent as JSON.
    """
    # A browser asks for permission before a page may send this type, so that no page can submit trajectories.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise SubmissionError("the header Content-Type must be application/json", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise SubmissionError(f"a request must have at most {MAX_BODY_BYTES} bytes; send fewer at once", status=413)
    return bytes(body)


def _reply(groups: Sequence[StoredGroup]) -> Response:
    """The groups as JSON; the texts of the trajectories are JSON already."""
    texts = []
    for group in groups:
        bodies = ", ".join(group.bodies)
        texts.append(f'{{"position": {group.position}, "name": {json.dumps(group.name)}, "trajectories": [{bodies}]}}')
    return Response(f'{{"groups": [{", ".join(texts)}]}}', media_type="application/json")


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
