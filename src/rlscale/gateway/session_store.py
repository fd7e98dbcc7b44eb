"""The sessions of a gateway, in memory and on disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from rlscale.errors import EngineError, RenderError
from rlscale.gateway.apis.chat_answer import ChatAnswer
from rlscale.gateway.codec import Codec
from rlscale.gateway.session import Session
from rlscale.gateway.session_log import SessionLog, find_logs
from rlscale.gateway.session_spec import SessionSpec

log = logging.getLogger(__name__)

KEEP_S = 3600.0
"""Time after the end of its key in which the driver can still get the record of a session."""

T = TypeVar("T")


class LiveSession:
    """A session with its running calls. Its methods belong to the event loop."""

    def __init__(self, session: Session, executor: Executor) -> None:
        self.session, self._executor = session, executor
        self._lock = asyncio.Lock()
        self.requests: set[asyncio.Task[object]] = set()  # that wait for an answer
        self.calls: dict[str, asyncio.Future[ChatAnswer]] = {}  # that are running, by the fingerprint of the request

    async def run(self, call: Callable[[], T]) -> T:
        """Runs a call of the session in a thread, after those before it. Cancelling waits for its end."""
        task = asyncio.ensure_future(self._run_in_order(call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _run_in_order(self, call: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def end_requests(self) -> None:
        """Cancels the calls that wait for an engine; their clients get an error."""
        for task in list(self.requests):
            task.cancel()
        while self.requests:
            await asyncio.wait(list(self.requests))
            await asyncio.sleep(0)  # the tasks remove themselves


class SessionStore:
    """Opens, finds and drops sessions.

    Args:
        on_drop: called with the id of each session that is dropped.

    Example:
        store = SessionStore(folder, codec, executor, on_drop=engines.forget)
        store.restore()
        opened = await store.open(spec)
    """

    def __init__(self, folder: Path, codec: Codec, executor: Executor, *, on_drop: Callable[[str], None]) -> None:
        self._folder, self._codec, self._executor, self._on_drop = folder, codec, executor, on_drop
        self._sessions: dict[str, LiveSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def restore(self) -> None:
        """Reads the sessions of the folder. A file that cannot be read is kept and reported."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in find_logs(self._folder):
            try:
                first, *others = file.read()
                session = Session(SessionSpec.from_json(first["session"]), self._codec, file)
                session.replay(others)
            # A damaged file must not keep the gateway, and so every other session, from starting.
            except (ValueError, KeyError, TypeError, IndexError, AssertionError, EngineError, RenderError) as error:
                log.error("%s is no session: %s: %s", file.path, type(error).__name__, error)
                continue
            self._sessions[session.spec.id] = LiveSession(session, self._executor)

    async def open(self, spec: SessionSpec) -> LiveSession:
        """Opens a session. One that is open already, from an earlier attempt of this call, stays as it is."""
        # The driver repeats a call whose answer was lost.
        known = self._sessions.get(spec.id)
        if known is not None:
            return known
        opened = LiveSession(Session(spec, self._codec, SessionLog(self._folder, spec.id)), self._executor)
        self._sessions[spec.id] = opened
        try:
            await opened.run(opened.session.begin)
        except OSError:
            del self._sessions[spec.id]
            raise
        return opened

    def find(self, session_id: str) -> LiveSession | None:
        return self._sessions.get(session_id)

    async def drop(self, session_id: str) -> None:
        """Ends a session and deletes its file."""
        opened = self._sessions.pop(session_id, None)
        if opened is not None:
            # First: a call that ends now must not write the file again.
            opened.session.is_finished = True
            await opened.end_requests()
            self._on_drop(session_id)
            await opened.run(opened.session.delete)

    async def drop_expired(self) -> int:
        """Drops the sessions whose record was not asked for in time; returns their number."""
        end_s = time.time() - KEEP_S
        expired = [each for each, opened in self._sessions.items() if opened.session.spec.expires_s < end_s]
        for session_id in expired:
            try:
                await self.drop(session_id)
            except OSError as error:  # the others are dropped, too; a gateway that restarts finds this file again
                log.error("the file of an expired session cannot be deleted: %s", error)
        return len(expired)
