"""The client of an engine that speaks SGLang's HTTP API."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rlscale.architectures.hf_config import hf_fields
from rlscale.engines.client.generate_messages import (
    INITIAL_VERSION_NAME,
    build_batch_body,
    build_body,
    parse_generation,
    parse_version,
)
from rlscale.engines.client.http_connection import HttpConnection
from rlscale.engines.client.in_flight_limit import InFlightLimit
from rlscale.engines.client.request_ids import RequestIds, routing_key
from rlscale.engines.client.sglang_adapters import SglangAdapters, adapter_path
from rlscale.engines.server.server_name import SERVER_KEY, SERVER_NAME
from rlscale.errors import EngineError
from rlscale.images import collapse_placeholders
from rlscale.types import EngineAddress, Generation, SamplingParams, WeightVersion
from rlscale.weight_types import AdapterUpdate, RankChecksums, WeightBucket, WeightGroup

HEALTH_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0  # from the last answer until SGLang no longer counts its request as running


class GeneratePost(Protocol):
    """Sends a request to `/generate` of an address, e.g. from another process, and returns the decoded response.

    Raises EngineError as `HttpConnection.call`, which explains `session`. Cancelling it ends the request.
    """

    async def __call__(
        self, address: EngineAddress, body: Mapping[str, Any], *, timeout_s: float, session: str | None = None
    ) -> Any: ...


class HttpEngine:
    """One engine over HTTP. Not bound to an event loop until its first call.

    `generate` and calls that only read are retried when their connection drops: they can safely run twice. Calls that
    change the engine use a connection that was idle for a second at most, so that it cannot have been dropped; they
    are retried only when no connection was established in time.

    Args:
        timeout_s: of each call, from its start; a call that waits for `max_in_flight` has not started.
        max_in_flight: maximum number of samples in flight, over all calls of `generate`. None: no limit.
        router: receives `generate` and `stream` in place of the engine; any engine behind it may answer.
        ids: shared by the clients of engines behind one router, so that each can abort the calls of all; None: its own.
        post: sends the requests of `generate`; None: this process does.

    Example:
        engine = HttpEngine(EngineAddress(name="engine 0", url="http://127.0.0.1:30000"), timeout_s=600)
        answers = await engine.generate([4, 7, 5], SamplingParams(max_new_tokens=8), n=4)
        await engine.close()
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        timeout_s: float,
        max_in_flight: int | None = None,
        router: EngineAddress | None = None,
        ids: RequestIds | None = None,
        post: GeneratePost | None = None,
    ) -> None:
        self._address, self._post, self._timeout_s = address, post, timeout_s
        self._router = router or address
        self._connection = HttpConnection(address, router=self._router, timeout_s=timeout_s)
        self._adapters = SglangAdapters(address, self._connection) if address.names_versions else None
        self.max_in_flight = max_in_flight
        self._limit = None if max_in_flight is None else InFlightLimit(max_in_flight)
        self._vocab_size: int | None = None
        self._reading: asyncio.Task[None] | None = None  # the properties of the server that requests are checked by
        self._ids = RequestIds() if ids is None else ids
        self._is_sglang = False
        self._draws_by_seed = False  # SGLang then gives all n samples of a request one seed
        self._flush_on_update = True
        # SGLang would load the weights into its draft model, too.
        self._selector = {"selector": "target"} if address.keeps_draft else {}

    @property
    def address(self) -> EngineAddress:
        return self._address

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        return await self._connection.is_healthy(timeout_s=timeout_s)

    async def info(self) -> dict[str, Any]:
        info = dict(await self._connection.call("GET", "/server_info", may_repeat=True))
        info.update(await self._connection.call("GET", "/model_info", may_repeat=True))
        info["weight_version"] = self._parse_version(info)
        if self._adapters is not None:
            info["adapters"] = await self._adapters.loaded()
        if not isinstance(info.get("vocab_size"), int):
            info["vocab_size"] = self._read_vocab_size(info)
        return info

    async def weight_version(self) -> WeightVersion:
        return self._parse_version(await self._connection.call("GET", "/model_info", may_repeat=True))

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        wire_ids = await self._check_request(input_ids, params)
        # SGLang gives the n samples of one request random ids, which no client knows and could abort.
        splits = self._is_sglang and n > 1
        began_s = time.monotonic()
        async with self._limit_in_flight(n):
            queued_s = time.monotonic() - began_s
            version = await self._adapter_version()
            adapter = adapter_path(self._address, version)
            with self._ids.open(rid, n if splits else 1) as ids:
                session = self._session_of(rid)
                if splits and self._router is not self._address:
                    objects = await self._send_each(wire_ids, params, ids, n=n, session=session)
                elif splits:
                    objects = await self._send(build_batch_body(wire_ids, params, ids, n=n, adapter=adapter), n=n)
                else:
                    body = build_body(wire_ids, params, ids, n=n, adapter=adapter)
                    objects = await self._send(body, n=n, session=session)
        answers = [self._parse(o, input_ids, params, version=version) for o in objects]
        return [replace(answer, queued_s=queued_s + answer.queued_s) for answer in answers]

    async def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str | None = None
    ) -> AsyncGenerator[Generation]:
        wire_ids = await self._check_request(input_ids, params)
        finished = False
        version = await self._adapter_version()
        with self._ids.open(rid, 1) as ids:
            body = {**build_body(wire_ids, params, ids, adapter=adapter_path(self._address, version)), "stream": True}
            calls = self._connection.stream("/generate", body, session=self._session_of(rid))
            async with aclosing(calls) as events:
                async for event in events:
                    answer = self._parse(event, input_ids, params, version=version)
                    finished = bool(answer.finish_reason)
                    yield answer
        if not finished:
            raise EngineError(
                f"{self._connection.endpoint('/generate')} must stream to the end, got a stream without one"
            )

    async def abort(self, rid: str | None = None) -> None:
        # Engines that several jobs share also run the requests of the others; SGLang's engines have one job.
        is_shared = self._address.adapter is not None and self._adapters is None
        own = {"lora_name": self._address.adapter} if is_shared else {}
        bodies = [{"abort_all": True, **own}] if rid is None else [{"rid": each} for each in self._ids.of(rid)]
        await asyncio.gather(*[self._connection.call("POST", "/abort_request", body) for body in bodies])

    async def pause(self, mode: str = "retract") -> None:
        await self._connection.call("POST", "/pause_generation", {"mode": mode})
        # Requests that stay in place keep their cache across the update; a flush would be refused.
        self._flush_on_update = mode != "in_place"

    async def resume(self) -> None:
        await self._connection.call("POST", "/continue_generation", {})
        self._flush_on_update = True

    async def flush_cache(self) -> None:
        await self._connection.call("POST", "/flush_cache", {})

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        # A real SGLang server exits if a request runs while it releases memory; a flush is refused instead. SGLang
        # counts a request as running for a short time after its answer.
        await self._connection.call("POST", f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}", {})
        await self._connection.call("POST", "/release_memory_occupation", {"tags": list(tags) or None})

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        await self._connection.call("POST", "/resume_memory_occupation", {"tags": list(tags) or None})

    async def join_weight_group(self, group: WeightGroup, rank_offset: int) -> None:
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
            "timeout_s": group.timeout_s,
            "num_links": group.num_links,
        }
        await self._connection.call("POST", "/init_weights_update_group", body)

    async def leave_weight_group(self, name: str) -> None:
        await self._connection.call("POST", "/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        await self._connection.call("POST", "/begin_weight_update", self._selector)

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, version: WeightVersion) -> None:
        # The version is not sent here: the engine has `version` only after the last bucket (end_weight_update).
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "checksums": bucket.checksums,
            "group_name": group_name,
            "load_format": bucket.load_format,
            "flush_cache": self._flush_on_update,
            **self._selector,
        }
        await self._connection.call("POST", "/update_weights_from_distributed", body)

    async def update_from_tensor(self, payloads: Sequence[str], *, load_format: str | None) -> None:
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": self._flush_on_update,
            **self._selector,
        }
        await self._connection.call("POST", "/update_weights_from_tensor", body)

    async def update_from_disk(
        self, folder: Path, *, version: WeightVersion, checksums: Mapping[str, str], load_format: str | None = None
    ) -> None:
        body = {
            "model_path": str(folder),
            # Not the format that the server was started with, which may be `dummy`.
            "load_format": load_format or "auto",
            "weight_version": str(version),
            "flush_cache": self._flush_on_update,
            "checksums": dict(checksums),
        }
        await self._connection.call("POST", "/update_weights_from_disk", body)

    async def end_weight_update(self, version: WeightVersion) -> None:
        await self._connection.call("POST", "/end_weight_update", {})
        await self._connection.call(
            "POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    async def load_adapter(self, update: AdapterUpdate) -> None:
        if self._adapters is not None:
            await self._adapters.load(update)
            return
        body = {
            "lora_name": update.name,
            "config_dict": dict(update.config),
            "serialized_named_tensors": [update.payload],
            "load_format": "safetensors",
            "weight_version": update.version,
            "checksums": dict(update.checksums),
            "num_kept": update.num_kept,
        }
        await self._connection.call("POST", "/load_lora_adapter_from_tensors", body)

    async def unload_adapter(self, name: str) -> None:
        """Removes all versions of an adapter. Raises EngineError with status 400 if the engine has none."""
        if self._adapters is not None:
            await self._adapters.unload(name)
            return
        await self._connection.call("POST", "/unload_lora_adapter", {"lora_name": name})

    async def prune_adapter(self, name: str, *, num_kept: int) -> None:
        if self._adapters is not None:
            await self._adapters.prune(name, num_kept=num_kept)

    async def checksums(self) -> list[RankChecksums]:
        answer = await self._connection.call("POST", "/weights_checker", {"action": "checksum", **self._selector})
        return [_parse_checksums(rank) for rank in answer["ranks"]]

    async def close(self) -> None:
        await self._connection.close()

    def _session_of(self, rid: str | None) -> str | None:
        """The session of a call for the router; None: there is no router, or the call has no name."""
        return None if rid is None or self._router is self._address else routing_key(rid)

    async def _send(self, body: Mapping[str, Any], *, n: int, session: str | None = None) -> list[Mapping[str, Any]]:
        if self._post is None:
            answer = await self._connection.call("POST", "/generate", body, may_repeat=True, session=session)
        else:
            answer = await self._post(self._router, body, timeout_s=self._timeout_s, session=session)
        objects = answer if isinstance(answer, list) else [answer]
        if len(objects) != n:
            raise EngineError(f"{self._connection.endpoint('/generate')} must return {n} answers, got {len(objects)}")
        return objects

    async def _send_each(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        ids: Sequence[str] | None,
        *,
        n: int,
        session: str | None,
    ) -> list[Mapping[str, Any]]:
        """`n` single requests: sglang-router refuses a batch with parameters or ids of each sample."""
        seed = params.sampling_seed
        bodies = [
            build_body(
                input_ids,
                params if seed is None else replace(params, sampling_seed=seed + j),
                None if ids is None else [ids[j]],
            )
            for j in range(n)
        ]
        calls = [asyncio.ensure_future(self._send(body, n=1, session=session)) for body in bodies]
        try:
            return [(await call)[0] for call in calls]
        finally:
            for call in calls:
                call.cancel()  # after a failure the others are not needed; a finished one is left as it is
            await asyncio.gather(*calls, return_exceptions=True)

    def _limit_in_flight(self, num_samples: int) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._limit is None else self._limit.enter(num_samples)

    async def _check_request(self, input_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The token ids to send.

        Raises for requests that crash a real SGLang server or that it never answers: unknown token ids, min_p with
        drawing by seed, other placeholders than those of the images.
        """
        if self._vocab_size is None:
            await self._read_properties_once()
        assert self._vocab_size is not None, "read above"
        if self._draws_by_seed and params.min_p > 0:
            raise self._refusal(f"min_p must be 0 with SGLang's enable_deterministic_inference, got {params.min_p:g}")
        if not input_ids or min(input_ids) < 0 or max(input_ids) >= self._vocab_size:
            wrong = [token for token in input_ids if not 0 <= token < self._vocab_size]
            rule = f"be token ids below the engine's vocabulary size {self._vocab_size}"
            raise self._refusal(f"input_ids must {rule}, got {wrong[:5] or 'none'}")
        if not (self._is_sglang and params.images):
            return input_ids
        try:
            return collapse_placeholders(input_ids, params.images)
        except ValueError as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, reason: str) -> EngineError:
        """The error of a request that is not sent, as the engine itself would refuse it."""
        return EngineError(f"{self._connection.endpoint('/generate')} {reason}", status=400, reason=reason)

    async def _read_properties_once(self) -> None:
        """Makes one call, however many first requests wait for it: thousands may start at the same time."""
        if self._reading is None or self._reading.get_loop() is not asyncio.get_running_loop():
            self._reading = asyncio.create_task(self._read_properties())
        reading = self._reading
        try:
            # Shielded: a request that is cancelled must not fail the others.
            await asyncio.shield(reading)
        finally:
            if reading.done() and self._reading is reading:
                self._reading = None  # after a failure the next request calls again

    async def _read_properties(self) -> None:
        info = await self.info()
        self._is_sglang = info.get(SERVER_KEY) != SERVER_NAME
        self._draws_by_seed = bool(info.get("enable_deterministic_inference", False))
        self._vocab_size = int(info["vocab_size"])

    async def _adapter_version(self) -> WeightVersion | None:
        """The version that a request must name; None: the server chooses the newest itself."""
        return None if self._adapters is None else await self._adapters.newest()

    def _parse(
        self,
        answer: Mapping[str, Any],
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        version: WeightVersion | None = None,
    ) -> Generation:
        return parse_generation(
            answer,
            params,
            version=version,
            prompt_len=len(input_ids),
            endpoint=self._connection.endpoint("/generate"),
            engine=self._router.name,
        )

    def _parse_version(self, model_info: Mapping[str, Any]) -> WeightVersion:
        version = model_info.get("weight_version", INITIAL_VERSION_NAME)
        if self._address.adapter is not None and self._adapters is None:
            # The newest of this job; the engine's own version is that of the base.
            version = (model_info.get("adapters", {}).get(self._address.adapter) or [INITIAL_VERSION_NAME])[-1]
        return parse_version(version, self._connection.endpoint("/model_info"))

    def _read_vocab_size(self, info: Mapping[str, Any]) -> int:
        # After an update from disk, model_path is the folder of the update, which may contain weights only.
        configs = [Path(str(info.get(key, ""))) / "config.json" for key in ("model_path", "tokenizer_path")]
        config = next((path for path in configs if path.is_file()), None)
        if config is None:
            raise EngineError(
                f"{self._connection.endpoint('/model_info')} must report vocab_size, "
                f"or a model_path that this machine can read, got {configs[0]}"
            )
        return int(hf_fields(json.loads(config.read_text()))["vocab_size"])


def _parse_checksums(answer: Mapping[str, Any]) -> RankChecksums:
    """The checksums of one rank; only SGLang reports which one."""
    place = answer.get("parallelism_info", {"tp_rank": 0, "tp_size": 1})
    if isinstance(place, list):
        place = place[0]  # of the model, before those of draft models
    return RankChecksums(checksums=answer["checksums"], rank=place["tp_rank"], size=place["tp_size"])
