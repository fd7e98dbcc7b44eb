"""Pool of engines: sends each request to the engine with the fewest running samples."""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import Engine
from rlscale.rewards import JudgeClient
from rlscale.types import Generation, SamplingParams, WeightVersion

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.1
_DIED = "died during a request"


class DeadEngineHandler(Protocol):
    """Restarts dead engines. An engine is named by its index in the pool."""

    def is_down(self, index: int) -> bool:
        """True from the death of an engine until it holds the current weights again."""
        ...

    async def is_dead(self, index: int) -> bool:
        """Whether an engine is dead or being restarted."""
        ...

    async def recover(self, index: int) -> bool:
        """Returns True once a dead engine is up again, False when it was not dead."""
        ...


class RequestGate(Protocol):
    """Another sender of requests to the same engines: the gateway, whose requests must not see an update either."""

    async def pause(self, *, waits_idle: bool) -> None:
        """Holds new requests back; with `waits_idle` it returns when none is running."""
        ...

    async def resume(self) -> None: ...


class EnginePool:
    """Balances requests over engines and rejects answers of old weights.

    `drain` and `admit` enclose a weight update that no request may see.

    Invariant: every token that the pool returns was made by a weight version inside [oldest, newest] of its request.
    """

    def __init__(self, engines: Sequence[Engine], *, absent: Collection[int] = (), routed: bool = False) -> None:
        """Args:
        absent: indices of engines that do not exist yet; `replace` adds them.
        routed: a router sends each request to an engine of its choice; the clients share their request ids.
        """
        assert len(engines) > len(absent), "a pool needs at least one engine"
        self._absent, self._routed = set(absent), routed
        self.engines = list(engines)
        self._retired: list[Engine] = []
        self._handler: DeadEngineHandler | None = None
        self._in_flight = [0] * len(self.engines)
        self._requests: list[set[asyncio.Task[Any]]] = [set() for _ in self.engines]  # tasks that wait for an answer
        self._engine_of: dict[str, int] = {}  # of each running request
        self._admits, self._idle = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._idle.set()
        self._stalled, self._num_stalled = asyncio.Event(), 0
        self._stalls_gateway = False
        self.gateway: RequestGate | None = None  # of the run's agents
        self._resuming: asyncio.Future[None] | None = None
        # URLs of the engines that released the memory of weights or cache; a new pool takes over those of an earlier
        # one. By URL, not by index: a restarted engine has another one, and all its memory.
        self.models: JudgeClient | None = None  # frozen models, for user code that generates
        self.released: dict[str, set[str]] = {"weights": set(), "kv_cache": set()}

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        n: int,
        rid: str,
        oldest: WeightVersion,
        newest: WeightVersion | None,
    ) -> list[Generation]:
        """`n` answers to `token_ids`.

        Args:
            newest: None accepts every version from `oldest` on: weights may be updated while the request runs.

        Raises:
            WeightSyncError: an engine answered with weights outside [oldest, newest]; the message names it.
            EngineError: the engine refused or could not be reached.
        """
        began_s = time.monotonic()
        while True:
            while not self._admits.is_set():
                await self._admits.wait()
            index = self._choose()
            engine = self.engines[index]
            queued_s = time.monotonic() - began_s
            try:
                answers = await self._send(index, token_ids, params, n=n, rid=rid)
                break
            except EngineError:
                # A dead engine is no fault of the request: with the same seed a retry gets the same answer.
                if not await self._is_recovered(index, engine):
                    raise
        for answer in answers:
            _check_versions(answer, oldest=oldest, newest=newest)
        return [replace(answer, queued_s=queued_s + answer.queued_s) for answer in answers]

    def set_handler(self, handler: DeadEngineHandler) -> None:
        """Makes requests wait for dead engines, which `handler` restarts."""
        self._handler = handler

    def replace(self, index: int, engine: Engine) -> None:
        """Replaces the client of a restarted engine."""
        self._retired.append(self.engines[index])
        self.engines[index] = engine
        self._absent.discard(index)

    @property
    def present(self) -> list[Engine]:
        """The engines without those that have left or do not exist yet."""
        return [engine for index, engine in enumerate(self.engines) if index not in self._absent]

    def set_gateway_stall(self, is_stalled: bool) -> None:
        """Notes whether the gateway has no engine for its requests, see `wait_unless_stalled`."""
        self._stalls_gateway = is_stalled
        self._update_stalled()

    @property
    def up(self) -> list[Engine]:
        """The engines that may get requests: those that hold the current weights."""
        return [self.engines[index] for index in self._find_up() if index not in self._absent]

    def remove(self, index: int) -> None:
        """Removes an engine that has left; requests that it still holds fail, and are retried."""
        self._absent.add(index)
        self.drop_requests(index)

    async def wait_idle(self, index: int) -> None:
        """Waits until an engine, which gets no requests any more, has answered those that it holds."""
        while self._in_flight[index]:
            await asyncio.sleep(IDLE_POLL_S)

    def drop_requests(self, index: int) -> None:
        """Ends the requests that an engine holds, which has died; they are retried."""
        requests, self._requests[index] = self._requests[index], set()  # each is ended once
        for request in requests:
            request.cancel(_DIED)

    async def wait_unless_stalled(self, task: "asyncio.Task[Any]") -> bool:
        """Waits for a task; False when it waits for a dead engine, which may need the next weights to be up again."""
        stalled = asyncio.ensure_future(self._stalled.wait())
        try:
            await asyncio.wait([task, stalled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stalled.cancel()
        return task.done()

    async def drain(self) -> None:
        """Holds new requests back until `admit`, and returns when no request is running."""
        self._admits.clear()
        await self._pause_gateway()
        await self._idle.wait()

    def admit(self) -> None:
        """Admits requests again, in the order of their arrival."""
        self._admits.set()
        if self.gateway is not None:
            self._resuming = asyncio.ensure_future(self.gateway.resume())

    async def release_memory(self) -> None:
        """Releases the memory of weights and cache on every engine. No request may be running."""
        await self._pause_gateway()
        indices = [index for index in range(len(self.engines)) if index not in self._absent]
        await asyncio.gather(*[self._release(index) for index in indices])

    async def resume_memory(self, tag: str) -> None:
        """Resumes the memory of `weights`, which must then be sent, or of `kv_cache`, and then generation."""
        urls = [engine.address.url for engine in self.engines]
        await asyncio.gather(*[self._resume(i, tag) for i, url in enumerate(urls) if url in self.released[tag]])
        self.released[tag].clear()
        # A drain that is still on is ended by `admit`.
        if tag == "kv_cache" and self.gateway is not None and self._admits.is_set():
            await self.gateway.resume()

    async def abort_requests(self, rids: Collection[str]) -> None:
        """Aborts the running requests whose id is, or begins with, one of `rids` and a dash."""
        names = frozenset(rids)
        found = [(rid, index) for rid, index in self._engine_of.items() if not names.isdisjoint(_prefixes(rid))]
        await asyncio.gather(*[_abort(engine, rid) for rid, index in found for engine in self._may_hold(index)])

    async def abort(self) -> None:
        """Aborts every running request on the engines that answer."""
        await asyncio.gather(*[_abort(engine) for engine in self.present])

    async def close(self) -> None:
        for engine in (*self.engines, *self._retired):
            await engine.close()

    async def _pause_gateway(self) -> None:
        if self.gateway is None:
            return
        if self._resuming is not None:
            await self._resuming  # an earlier one that comes late would end this pause
        await self.gateway.pause(waits_idle=True)

    def _may_hold(self, index: int) -> list[Engine]:
        """The engines that may hold a request that was sent by the client `index`."""
        return self.present if self._routed else [self.engines[index]]

    def _choose(self) -> int:
        """The engine with the fewest samples in flight, among those that are up if there are any."""
        present = [i for i in range(len(self.engines)) if i not in self._absent]
        return min(self._find_up() or present, key=self._in_flight.__getitem__)

    def _find_up(self) -> Sequence[int]:
        handler, indices = self._handler, range(len(self.engines))
        return indices if handler is None else [i for i in indices if not handler.is_down(i)]

    async def _send(
        self, index: int, token_ids: Sequence[int], params: SamplingParams, *, n: int, rid: str
    ) -> list[Generation]:
        self._in_flight[index] += n
        self._engine_of[rid] = index
        self._idle.clear()
        try:
            if self._handler is not None and self._handler.is_down(index):
                raise EngineError(f"{self.engines[index].address.name} is being restarted")
            return await self._answer(index, self.engines[index].generate(token_ids, params, n=n, rid=rid))
        finally:
            self._in_flight[index] -= n
            self._engine_of.pop(rid, None)
            if not any(self._in_flight):
                self._idle.set()

    async def _answer(self, index: int, call: Coroutine[Any, Any, list[Generation]]) -> list[Generation]:
        request = asyncio.current_task()
        assert request is not None, "requests are sent by tasks"
        self._requests[index].add(request)
        try:
            return await call
        except asyncio.CancelledError as error:
            # Its owner may have cancelled it in the same moment.
            if error.args != (_DIED,) or request.uncancel():
                raise
            raise EngineError(f"{self.engines[index].address.name} {_DIED}") from None
        finally:
            self._requests[index].discard(request)

    async def _is_recovered(self, index: int, engine: Engine) -> bool:
        """Whether to retry a request that failed on `engine`: the engine was restarted before or during this call."""
        if self._handler is None:
            return False
        self._num_stalled += 1
        self._update_stalled()
        try:
            return await self._handler.recover(index) or self.engines[index] is not engine
        finally:
            self._num_stalled -= 1
            self._update_stalled()

    def _update_stalled(self) -> None:
        if self._num_stalled or self._stalls_gateway:
            self._stalled.set()
        else:
            self._stalled.clear()

    async def _resume(self, index: int, tag: str) -> None:
        engine = self.engines[index]
        try:
            await engine.resume_memory([tag])
            if tag == "kv_cache":
                await engine.resume()
            # Each for itself: an attempt that fails at another engine must not resume this one again.
            self.released[tag].discard(engine.address.url)
        except EngineError:
            # A dead engine restarts with all its memory. Not `recover`: it waits for the weights that come next.
            if self._handler is None or not await self._handler.is_dead(index):
                raise

    async def _release(self, index: int) -> None:
        engine = self.engines[index]
        try:
            await engine.pause()
            await engine.release_memory(list(self.released))
        except EngineError:
            # A dead engine restarts with all its memory. Not `recover`: its weights would be sent to all engines, and
            # those that have released theirs cannot take them.
            if self._handler is None or not await self._handler.is_dead(index):
                raise
            return
        for urls in self.released.values():
            urls.add(engine.address.url)


def _prefixes(rid: str) -> Iterator[str]:
    """The id, and what comes before each of its dashes."""
    yield rid
    end = rid.rfind("-")
    while end >= 0:
        yield rid[:end]
        end = rid.rfind("-", 0, end)


async def _abort(engine: Engine, rid: str | None = None) -> None:
    try:
        await engine.abort(rid)
    except EngineError as error:
        # A dead engine has no requests; any other failure shows at the next call.
        log.info("no request was aborted: %s", error)


def _check_versions(answer: Generation, *, oldest: WeightVersion, newest: WeightVersion | None) -> None:
    wrong = {v for v in answer.weight_versions if v < oldest or (newest is not None and v > newest)}
    if wrong:
        upper = "" if newest is None else f" to {newest}"
        expected = f"version {newest}" if oldest == newest else f"versions from {oldest}{upper}"
        raise WeightSyncError(
            f"{answer.engine} must generate with weight {expected}, got {sorted(wrong)}; its weights were not updated, "
            "so its samples cannot be trained on"
        )
