"""The embedded engine as an `EngineService`: passes calls of the event loop to the decode thread."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.embedded.vision_tower import OpenImages
from rlscale.engines.server.engine_service import Load
from rlscale.engines.server.generate_request import (
    Answer,
    BadRequest,
    FolderUpdate,
    GenerateRequest,
    Limits,
    Refused,
    TensorUpdate,
)
from rlscale.engines.server.streaming import LatestAnswers
from rlscale.weight_types import POLICY_ADAPTER, AdapterUpdate, WeightBucket, WeightGroup

T = TypeVar("T")


class TextCodec(Protocol):
    """Token ids to text and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class EmbeddedService:
    """An `EngineService` over a `Scheduler`. Without a codec it accepts no text and returns empty text."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        *,
        codec: TextCodec | None = None,
        facts: dict[str, Any],
        open_images: OpenImages | None = None,
    ) -> None:
        self.limits = limits
        self._scheduler, self._codec, self._facts = scheduler, codec, facts
        self._open_images = open_images
        self._base_checksums: dict[str, str] | None = None  # of a shared base, which never changes

    async def generate(self, request: GenerateRequest) -> list[Answer]:
        self._check(request)
        request = await self._with_images(request)
        future = self._scheduler.submit(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._scheduler.call(lambda: self._scheduler.abort(request.rid))  # the client disconnected
            raise

    async def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        self._check(request)
        request = await self._with_images(request)
        loop, latest = asyncio.get_running_loop(), LatestAnswers()

        # Called in the decode thread; the event loop owns `latest`.
        def on_token(index: int, answer: Answer) -> None:
            loop.call_soon_threadsafe(latest.update, index, answer)

        future = asyncio.wrap_future(self._scheduler.submit(request, on_token))
        future.add_done_callback(lambda f: latest.end(None if f.cancelled() else f.exception()))
        try:
            async for state in latest.follow():
                yield state
        finally:
            if not future.done():
                self._scheduler.call(lambda: self._scheduler.abort(request.rid))  # the client disconnected

    def _check(self, request: GenerateRequest) -> None:
        if request.params.stop and self._codec is None:
            rule = "be replaced by stop_token_ids: this server has no tokenizer"
            raise BadRequest("sampling_params.stop", rule, list(request.params.stop))

    async def _with_images(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its images decoded, in a thread: neither the event loop nor the decode thread waits."""
        if not request.image_urls or self._open_images is None:
            return request
        try:
            images = await asyncio.to_thread(self._open_images, request.image_urls, request.input_ids)
        except ValueError as error:
            raise BadRequest("image_data", f"fit the prompt; {error}", f"{len(request.image_urls)} images") from error
        return replace(request, images=images)

    def encode(self, text: str) -> list[int]:
        if self._codec is None:
            raise BadRequest("text", "be replaced by input_ids: this server has no tokenizer", text)
        return self._codec.encode(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "" if self._codec is None else self._codec.decode(ids, skip_special_tokens=skip_special_tokens)

    async def abort(self, rid: str | None, *, adapter: str | None = None) -> None:
        if rid is None and adapter is None:
            self._require_own_base("abort_request", "of all requests")
        await self._call(lambda: self._scheduler.abort(rid, adapter=adapter))

    async def pause(self, mode: str) -> None:
        self._require_own_base("pause_generation")
        await self._call(lambda: self._scheduler.pause(mode))

    async def resume(self) -> None:
        await self._call(self._scheduler.resume)

    async def flush_cache(self) -> None:
        await self._call(self._scheduler.flush)

    def _require_own_base(self, call: str, what: str = "") -> None:
        """Refuses a call that would change or stop what other jobs use, too."""
        if self._scheduler.adapters.is_shared:
            given = f"{call} {what}".strip()
            raise Refused(f"{given} must not be called on a server whose base several jobs share (--max-adapters)")

    async def release_memory(self, tags: Collection[str]) -> None:
        self._require_own_base("release_memory_occupation")
        await self._call(lambda: self._scheduler.release_memory(tags))

    async def resume_memory(self, tags: Collection[str]) -> None:
        await self._call(lambda: self._scheduler.resume_memory(tags))

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        await self._call(lambda: self._scheduler.weights.join(group, rank))

    async def leave_group(self, name: str) -> None:
        await self._call(lambda: self._scheduler.weights.leave(name))

    async def begin_update(self) -> None:
        self._require_own_base("begin_weight_update")

        def begin() -> None:
            self._scheduler.weights.begin()
            # Adapters that stayed would be added to weights that may contain them.
            self._scheduler.adapters.clear()

        await self._call(begin)

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, flush: bool, version: str | None) -> None:
        scheduler = self._scheduler

        # One command, so that no step runs between the flush and the write.
        def receive() -> None:
            if flush:
                scheduler.flush()
            scheduler.forget_prefills()
            scheduler.weights.receive(bucket, group_name)
            if version is not None:
                scheduler.weights.set_version(version)

        await self._call(receive)

    async def receive_tensors(self, update: TensorUpdate) -> None:
        scheduler = self._scheduler

        def receive() -> None:
            if update.flush:
                scheduler.flush()
            scheduler.forget_prefills()
            scheduler.weights.receive_tensors(update.payload, update.load_format)
            if update.version is not None:
                scheduler.weights.set_version(update.version)

        await self._call(receive)

    async def load_folder(self, update: FolderUpdate) -> None:
        self._require_own_base("update_weights_from_disk")
        scheduler = self._scheduler

        def load() -> None:
            if update.abort_all:
                scheduler.abort(None)
            if update.flush:
                scheduler.flush()
            scheduler.forget_prefills()
            scheduler.adapters.clear()
            scheduler.weights.load(
                update.folder, load_format=update.load_format, version=update.version, checksums=update.checksums
            )
            if update.version is not None:
                scheduler.weights.set_version(update.version)

        await self._call(load)

    async def end_update(self) -> None:
        await self._call(self._scheduler.weights.end)

    async def load_adapter(self, update: AdapterUpdate) -> None:
        def load() -> None:
            self._scheduler.adapters.load(update)
            if update.name == POLICY_ADAPTER and not self._scheduler.adapters.is_shared:
                self._scheduler.weights.set_version(update.version)

        await self._call(load)

    async def unload_adapter(self, name: str) -> None:
        await self._call(lambda: self._scheduler.adapters.unload(name))

    async def set_version(self, version: str, *, abort_all: bool) -> None:
        self._require_own_base("update_weight_version")

        def change() -> None:
            if abort_all:
                self._scheduler.abort(None)
            self._scheduler.weights.set_version(version)

        await self._call(change)

    async def checksums(self) -> dict[str, str]:
        if not self._scheduler.adapters.is_shared:
            return await self._call(self._scheduler.weights.checksums)
        # Each job compares them at its start; hashing stops the decoding of all others.
        if self._base_checksums is None:
            self._base_checksums = await self._call(self._scheduler.weights.checksums)
        return self._base_checksums

    async def info(self) -> dict[str, Any]:
        return {
            **self._facts,
            "is_generation": True,
            "weight_version": self._scheduler.weights.version,
            "adapters": self._scheduler.adapters.loaded(),
            "vocab_size": self.limits.vocab_size,
            "has_image_understanding": self.limits.has_images,
            "max_context_len": self.limits.max_context_len,
            "context_length": self.limits.max_context_len,
            "enable_return_routed_experts": self.limits.has_experts,
        }

    def load(self) -> Load:
        return self._scheduler.load()

    def health(self) -> str | None:
        if self._scheduler.death is not None:
            return f"the decode thread has ended: {self._scheduler.death}"
        return self._scheduler.weights.fault

    async def _call(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._scheduler.call(command))
