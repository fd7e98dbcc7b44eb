"""A scripted engine for tests and load tests: SGLang's API without a model, with injected faults.

Its tokens depend on (prompt, seed, position) alone and need no computation, so one process can simulate many engines.
"""

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from aiohttp import web

from rlscale.engines.scripted.answers import ScriptedAnswers
from rlscale.engines.server.engine_service import Load, build_app
from rlscale.engines.server.generate_request import (
    Answer,
    BadRequest,
    FolderUpdate,
    GenerateRequest,
    Limits,
    Refused,
    TensorUpdate,
    VersionSpan,
)
from rlscale.engines.server.http_server import Server
from rlscale.engines.server.stop_conditions import find_finish_reason
from rlscale.engines.server.streaming import LatestAnswers
from rlscale.expert_routes import RouteShape
from rlscale.protocols import IncomingWeights, WeightReceiver
from rlscale.weight_types import POLICY_ADAPTER, AdapterUpdate, WeightBucket, WeightGroup

T = TypeVar("T")

EOS_ID = 1
FIRST_PLAIN_ID = 2
PAUSE_POLL_S = 0.002


@dataclass(slots=True)
class Faults:
    """Faults to inject from now on. May be changed at any time from any thread."""

    delay_s: float = 0.0  # before every answer to /generate
    errors_next: int = 0  # number of calls of /generate that fail with status 500
    drops_next: int = 0  # number of calls of /generate whose connection is dropped
    hangs: bool = False  # /generate never answers
    stale_version: bool = False  # version updates are acknowledged and ignored
    logprob_shift: float = 0.0  # added to every logprob
    drops_routes: bool = False  # answers lack their routes
    drops_adapters: bool = False  # adapters are acknowledged and ignored
    refuse_buckets: bool = False  # weight buckets fail with status 400 before they are received


@dataclass(eq=False, slots=True)
class _FakeSequence:
    request: GenerateRequest
    index: int
    seed: int
    latest: LatestAnswers | None = None  # receives every state of a streamed request
    aborted: bool = False
    num_retractions: int = 0
    script: tuple[int, ...] = ()  # the whole answer; empty: made-up tokens
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    def answer(self, finish: dict[str, Any] | None, version: str, shape: RouteShape | None = None) -> Answer:
        """A copy of the current state. `shape`: of the routes of a finished answer; None: no routes."""
        routes = None
        if shape is not None and self.request.return_routes and self.ids:
            routes = fake_routes((*self.request.input_ids, *self.ids)[:-1], shape)
        return Answer(
            output_ids=self.ids.copy(),
            logprobs=self.logprobs.copy(),
            spans=self.spans.copy(),
            finish_reason=finish,
            weight_version=self.spans[-1].version if self.spans else version,
            num_retractions=self.num_retractions,
            seconds=time.monotonic() - self.started_s,
            routes=routes,
        )


class FakeServer:
    """The fake engine in a separate thread, on a free loopback port.

    Example:
        with FakeServer(vocab_size=100) as fake:
            fake.faults.errors_next = 1
            engine = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=5)
    """

    def __init__(
        self,
        *,
        vocab_size: int = 100,
        max_context_len: int = 256,
        token_s: float = 0.0,
        receiver: WeightReceiver | None = None,
        api_key: str | None = None,
        routes: RouteShape | None = None,
    ) -> None:
        self.faults = Faults()
        limits = Limits(
            vocab_size=vocab_size,
            max_context_len=max_context_len,
            has_experts=routes is not None,
            has_penalties=False,  # it draws from no distribution
        )
        self.service = FakeService(limits, self.faults, token_s=token_s, receiver=receiver, routes=routes)
        self._app = build_app(self.service, api_key=api_key)
        self._app.middlewares.insert(0, _inject_faults(self.faults))
        self._loop = asyncio.new_event_loop()
        self._server = Server(self._app, host="127.0.0.1", port=0)
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake engine", daemon=True)

    @property
    def url(self) -> str:
        return self._server.url

    def start(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(timeout=10)
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def fake_token(prompt: tuple[int, ...], seed: int, position: int, vocab_size: int) -> tuple[int, float]:
    """The token and logprob of a position: any id but 0, and the end token with probability 1/16."""
    text = f"{seed}:{position}:{','.join(map(str, prompt))}".encode()
    # Disjoint bits of one hash: 0 to 3 for the end token, 20 to 31 for the probability, 32 to 63 for the id.
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    probability = ((number >> 20) % 4096 + 1) / 4097
    token = EOS_ID if number % 16 == 0 else FIRST_PLAIN_ID + (number >> 32) % (vocab_size - FIRST_PLAIN_ID)
    return token, math.log(probability)


def fake_routes(tokens: Collection[int], shape: RouteShape) -> npt.NDArray[np.int16]:
    """Routes that depend on token, position and layer alone: [tokens, layers, experts per token]."""
    starts = np.fromiter(tokens, np.int64, count=len(tokens)) * 7 + np.arange(len(tokens))
    first = starts[:, None, None] + 3 * np.arange(shape.num_layers)[:, None]
    return ((first + np.arange(shape.num_chosen)) % shape.num_experts).astype(np.int16)


class FakeService:
    """An `EngineService` without a model: made-up tokens, or the answers of a script."""

    def __init__(
        self,
        limits: Limits,
        faults: Faults,
        *,
        token_s: float = 0.0,
        receiver: WeightReceiver | None = None,
        routes: RouteShape | None = None,
        answers: ScriptedAnswers | None = None,
    ) -> None:
        self.limits, self.faults = limits, faults
        self._answers = answers
        self.version = "0"
        self.num_requests = self.num_descriptions = 0
        self._token_s, self._receiver, self._routes = token_s, receiver, routes
        self._receive_executor = ThreadPoolExecutor(
            1, "weights"
        )  # one thread: calls run one after the other, as in real engines
        self._running: list[_FakeSequence] = []
        self._paused_mode: str | None = None
        self._updating = False
        self._released: set[str] = set()
        self._has_weights = True
        self.adapters: dict[str, list[str]] = {}  # versions by name
        self._checksums = {"model.embed_tokens.weight": "0" * 16}

    async def generate(self, request: GenerateRequest) -> list[Answer]:
        return await self._run(request, None)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        latest = LatestAnswers()
        task = asyncio.ensure_future(self._run(request, latest))
        task.add_done_callback(lambda t: latest.end(None if t.cancelled() else t.exception()))
        try:
            async for state in latest.follow():
                yield state
        finally:
            task.cancel()

    async def _run(self, request: GenerateRequest, latest: LatestAnswers | None) -> list[Answer]:
        self.num_requests += 1
        if any(r.request.rid == request.rid for r in self._running):
            raise Refused(f"rid must be unique among open requests, got {request.rid!r}")
        if request.adapter is not None and request.adapter.partition("@")[0] not in self.adapters:
            raise BadRequest("lora_path", f"be a loaded adapter, {sorted(self.adapters)}", request.adapter)
        if self._paused_mode is None and self._lacks_memory():
            raise Refused("the engine's memory is released, or has no weights yet", status=503)
        if self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s)
        seed = request.params.sampling_seed
        if seed is None:
            seed = self.num_requests
        running = [_FakeSequence(request=request, index=j, seed=seed + j, latest=latest) for j in range(request.n)]
        self._running.extend(running)
        try:
            return list(await asyncio.gather(*(self._generate_one(r) for r in running)))
        finally:
            self._running = [r for r in self._running if r not in running]

    async def _generate_one(self, running: _FakeSequence) -> Answer:
        params = running.request.params
        if self._answers is not None:
            ids = await self._answers.find_ids(running.request, index=running.index, seed=running.seed)
            running.script = tuple(ids)
        eos_ids = frozenset({EOS_ID}) if self._answers is None else self._answers.eos_ids
        ends = eos_ids | frozenset(params.stop_token_ids)
        stops = frozenset[int]() if params.ignore_eos else ends
        finish: dict[str, Any] | None = None
        while finish is None and len(running.ids) < params.max_new_tokens:
            while self._is_blocked() and not running.aborted:
                await asyncio.sleep(PAUSE_POLL_S)
            if running.aborted:
                finish = {"type": "abort", "message": "Aborted"}
                break
            self._append_token(running, ends)
            finish = find_finish_reason(running.ids, params, stops, self.decode)
            if finish is None and running.latest is not None:
                running.latest.update(running.index, running.answer(None, self.version))
            if finish is None and self._token_s:
                await asyncio.sleep(self._token_s)
        # max_new_tokens = 0 leaves the loop without a reason.
        shape = None if self.faults.drops_routes else self._routes
        answer = running.answer(finish or {"type": "length", "length": 0}, self.version, shape)
        if running.latest is not None:
            running.latest.update(running.index, answer)
        return answer

    def _append_token(self, running: _FakeSequence, ends: frozenset[int]) -> None:
        request, params = running.request, running.request.params
        seed = 0 if params.temperature == 0 else running.seed
        position = len(request.input_ids) + len(running.ids)
        if running.script:
            # The end repeats where a request ignores it. The probability of a scripted token is 1.
            token, logprob = running.script[min(len(running.ids), len(running.script) - 1)], 0.0
        else:
            token, logprob = fake_token(request.input_ids, seed, position, self.limits.vocab_size)
        if len(running.ids) < params.min_new_tokens:
            while token in ends:
                token = (token + 1) % self.limits.vocab_size
        running.ids.append(token)
        running.logprobs.append(logprob + self.faults.logprob_shift)
        self._extend_spans(running)

    def _is_blocked(self) -> bool:
        return self._paused_mode is not None or self._updating or self._lacks_memory()

    def _lacks_memory(self) -> bool:
        return bool(self._released) or not self._has_weights

    def _extend_spans(self, running: _FakeSequence) -> None:
        end = len(running.ids)
        start = end - 1
        # A token of the same version extends the last span.
        if running.spans and running.spans[-1].version == self.version:
            start = running.spans.pop().start
        running.spans.append(VersionSpan(version=self.version, start=start, end=end))

    def encode(self, text: str) -> list[int]:
        if self._answers is not None:
            return self._answers.encode(text)
        return [FIRST_PLAIN_ID + ord(c) % (self.limits.vocab_size - FIRST_PLAIN_ID) for c in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        if self._answers is not None:
            return self._answers.decode(ids, skip_special_tokens=skip_special_tokens)
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i < FIRST_PLAIN_ID))

    async def abort(self, rid: str | None, *, adapter: str | None = None) -> None:
        # As SGLang does: an open id aborts those that begin with it, too.
        is_open = any(running.request.rid == rid for running in self._running)
        for running in self._running:
            name = (running.request.adapter or "").partition("@")[0]
            if adapter is not None and name != adapter:
                continue
            if rid is None or (is_open and running.request.rid.startswith(rid)):
                running.aborted = True

    async def pause(self, mode: str) -> None:
        self._paused_mode = mode
        if mode == "abort":
            await self.abort(None)
        elif mode == "retract":
            for running in self._running:
                running.num_retractions += 1

    async def resume(self) -> None:
        self._paused_mode = None

    async def flush_cache(self) -> None:
        # Retracted requests hold no cache, so only running and in-place ones block a flush.
        live = [r for r in self._running if not r.aborted]
        if live and self._paused_mode in (None, "in_place"):
            raise Refused("Flush cache failed.\nThere are running or waiting requests.")

    async def release_memory(self, tags: Collection[str]) -> None:
        if any(not r.aborted for r in self._running) and self._paused_mode in (None, "in_place"):
            raise Refused("release_memory_occupation must come when nothing runs; pause (abort or retract) before it")
        if self._released.intersection(tags):
            raise Refused(f"release_memory_occupation must name what is in memory, got {sorted(tags)}")
        self._released.update(tags)
        self._has_weights = self._has_weights and "weights" not in tags

    async def resume_memory(self, tags: Collection[str]) -> None:
        if not self._released.issuperset(tags):
            raise Refused(f"resume_memory_occupation must name what was released, got {sorted(tags)}")
        self._released.difference_update(tags)

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        if self._receiver is not None:
            await self._run_in_order(self._receiver.join, group, rank)

    async def leave_group(self, name: str) -> None:
        if self._receiver is not None:
            await self._run_in_order(self._receiver.leave, name)

    async def begin_update(self) -> None:
        if "weights" in self._released:
            raise Refused("weights cannot be updated: their memory is released; call resume_memory_occupation")
        self._updating = True

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, flush: bool, version: str | None) -> None:
        if not self._updating:
            raise Refused("update_weights_from_distributed must come after begin_weight_update")
        if self.faults.refuse_buckets:
            raise Refused("this engine is set to refuse buckets")
        if flush:
            await self.flush_cache()
        receiver = self._receiver
        if receiver is not None:
            # Open and write in one call: with two sending trainer ranks, one bucket is read before the next is opened.
            self._checksums.update(
                await self._run_in_order(lambda: receiver.open_bucket(bucket, group_name).write(None))
            )
        else:
            self._checksums.update(zip(bucket.names, bucket.checksums, strict=bool(bucket.checksums)))
        if version is not None:
            await self.set_version(version, abort_all=False)

    async def receive_tensors(self, update: TensorUpdate) -> None:
        if not self._updating:
            raise Refused("update_weights_from_tensor must come after begin_weight_update")
        if self.faults.refuse_buckets:
            raise Refused("this engine is set to refuse buckets")
        receiver = self._require_receiver()
        await self._read_weights(lambda: receiver.open_tensors(update.payload, update.load_format), flush=update.flush)
        if update.version is not None:
            await self.set_version(update.version, abort_all=False)

    async def load_folder(self, update: FolderUpdate) -> None:
        if update.abort_all:
            await self.abort(None)
        receiver, version = self._require_receiver(), update.version

        def open_folder() -> IncomingWeights:
            number = int(version) if version is not None and version.isdecimal() else None
            return receiver.open_folder(
                update.folder, load_format=update.load_format, version=number, checksums=update.checksums
            )

        await self._read_weights(open_folder, flush=update.flush)
        self._has_weights = True
        if version is not None:
            await self.set_version(version, abort_all=False)

    async def _read_weights(self, open_weights: Callable[[], IncomingWeights], *, flush: bool) -> None:
        """Reads all weights and keeps only their checksums."""
        if flush:
            await self.flush_cache()

        def write() -> dict[str, str]:
            try:
                incoming = open_weights()
            except ValueError as e:
                raise Refused(str(e)) from e
            return incoming.write(None)

        self._checksums.update(await self._run_in_order(write))

    async def _run_in_order(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._receive_executor, call, *args)

    def _require_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise Refused("this server was started without a weight receiver")
        return self._receiver

    async def end_update(self) -> None:
        if not self._updating:
            raise Refused("end_weight_update must come after begin_weight_update")
        self._updating, self._has_weights = False, True

    async def load_adapter(self, update: AdapterUpdate) -> None:
        if self.faults.drops_adapters:
            return
        self.adapters[update.name] = [*self.adapters.get(update.name, []), update.version][-update.num_kept :]
        if update.name == POLICY_ADAPTER:
            await self.set_version(update.version, abort_all=False)

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise BadRequest("lora_name", f"be among {sorted(self.adapters)}", name)

    async def set_version(self, version: str, *, abort_all: bool) -> None:
        if abort_all:
            await self.abort(None)
        if not self.faults.stale_version:
            self.version = version

    async def checksums(self) -> dict[str, str]:
        return dict(self._checksums)

    async def info(self) -> dict[str, Any]:
        self.num_descriptions += 1
        return {
            "model_path": "fake",
            "is_generation": True,
            "weight_version": self.version,
            "adapters": self.adapters,
            "vocab_size": self.limits.vocab_size,
            "has_image_understanding": self.limits.has_images,
            "max_context_len": self.limits.max_context_len,
            "compares_checksums": True,
            "weight_formats": [] if self._receiver is None else self._receiver.formats,
            "enable_return_routed_experts": self.limits.has_experts,
        }

    def load(self) -> Load:
        return Load(running=len(self._running), waiting=0)

    def health(self) -> str | None:
        return None


def _inject_faults(faults: Faults) -> Any:
    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path != "/generate":
            return await handler(request)
        if faults.hangs:
            await asyncio.Event().wait()
        if faults.drops_next > 0:
            faults.drops_next -= 1
            # Aborting the transport closes the connection without a response.
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        if faults.errors_next > 0:
            faults.errors_next -= 1
            return web.json_response({"error": {"message": "a scripted failure"}}, status=500)
        return await handler(request)

    return check
