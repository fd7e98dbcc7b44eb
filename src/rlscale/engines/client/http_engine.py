"""The client of an engine that speaks SGLang's HTTP API."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from rlscale.engines.client.in_flight_limit import InFlightLimit
from rlscale.engines.client.routed_experts import decode_routes
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import (
    EngineAddress,
    Generation,
    RouteIds,
    SamplingParams,
    WeightBucket,
    WeightGroup,
    WeightVersion,
)

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 5.0
SETTLING_S = 2.0  # from the last answer until the engine has put the request away
# SGLang closes connections that were idle for 5 s: none is used again that was idle for long. A call whose connection
# is closed all the same is made anew on one of its own: the next one of the pool may be just as dead.
KEEP_ALIVE_S = 3.0
# A call that changes the engine is not made twice: its connection must be one that was used a moment ago, or a new one.
MOMENT_S = 1.0
NEW = 0.0
ATTEMPTS = 3
STARTING_VERSION_NAME = "default"  # what SGLang calls the weights it was started with


class HttpEngine:
    """One engine over HTTP. Not bound to an event loop until its first call.

    Only `generate` and reading calls are repeated on a dropped connection: they can safely run twice. Calls that
    change the engine use a connection that was idle for a moment at most, so that it cannot have been dropped; they
    are repeated when none came about in time.

    Args:
        timeout_s: of each call, from its start on; a call that waits for admission has not started.
        max_in_flight: samples asked for at once, over all calls of `generate`. None: no limit.
        router: where `generate` and `stream` go instead; the engine behind it that answers may be any.

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
    ) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._router = router or address
        self.max_in_flight = max_in_flight
        self._limit = None if max_in_flight is None else InFlightLimit(max_in_flight)
        self._url = address.url.rstrip("/")
        self._sessions: dict[float, aiohttp.ClientSession] = {}  # by the seconds that connections may have been idle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._vocab_size: int | None = None
        self._draws_by_seed = False  # SGLang then gives all n samples of a request one seed
        self._flush_on_update = True

    @property
    def address(self) -> EngineAddress:
        return self._address

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session(idle_s=NEW).get(f"{self._url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def info(self) -> dict[str, Any]:
        info = dict(await self._call("GET", "/server_info", repeat=True))
        info.update(await self._call("GET", "/model_info", repeat=True))
        info["weight_version"] = self._version(info.get("weight_version", STARTING_VERSION_NAME), "/model_info")
        if not isinstance(info.get("vocab_size"), int):
            info["vocab_size"] = self._vocab_size_of_folder(info)
        return info

    async def weight_version(self) -> WeightVersion:
        info = await self._call("GET", "/model_info", repeat=True)
        return self._version(info.get("weight_version", STARTING_VERSION_NAME), "/model_info")

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        await self._check(input_ids, params)
        if self._draws_by_seed and params.sampling_seed is not None and n > 1:
            body = _batch_body(input_ids, params, rid, n=n)
        else:
            body = _generate_body(input_ids, params, rid)
            if n > 1:
                body["sampling_params"]["n"] = n
        async with self._admitted(n):
            answer = await self._call("POST", "/generate", body, repeat=True)
        objects = answer if isinstance(answer, list) else [answer]
        if len(objects) != n:
            raise EngineError(f"{self._at('/generate')} must return {n} answers, got {len(objects)}")
        return [self._generation(o, params, num_read=len(input_ids)) for o in objects]

    async def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str | None = None
    ) -> AsyncGenerator[Generation]:
        await self._check(input_ids, params)
        body = {**_generate_body(input_ids, params, rid), "stream": True}
        finished = False
        try:
            async with self._session(idle_s=NEW).post(self._url_of("/generate"), json=body) as response:
                if response.status != 200:
                    self._refused("/generate", response.status, _decoded(await response.read()))
                async for event in _events(response.content):
                    if "error" in event:
                        self._refused("/generate", event["error"].get("code", 500), event)
                    answer = self._generation(event, params, num_read=len(input_ids))
                    finished = bool(answer.finish_reason)
                    yield answer
        except TimeoutError as e:
            raise EngineError(f"{self._at('/generate')} must stream within {self._timeout_s:g} s, got nothing") from e
        except aiohttp.ClientError as e:
            raise EngineError(f"{self._at('/generate')} must stream to the end, got {type(e).__name__}: {e}") from e
        if not finished:
            raise EngineError(f"{self._at('/generate')} must stream to the end, got a stream without one")

    async def abort(self, rid: str | None = None) -> None:
        await self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self, mode: str = "retract") -> None:
        await self._call("POST", "/pause_generation", {"mode": mode})
        # Requests that stay in place keep their cache across the update; a flush would be refused.
        self._flush_on_update = mode != "in_place"

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})
        self._flush_on_update = True

    async def flush_cache(self) -> None:
        await self._call("POST", "/flush_cache", {})

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        # A real SGLang server ends when it is to release memory beside a running request; this it refuses instead. It
        # counts a request as running for a moment after its answer.
        await self._call("POST", f"/flush_cache?timeout={SETTLING_S:g}", {})
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags) or None})

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags) or None})

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
        await self._call("POST", "/init_weights_update_group", body)

    async def leave_weight_group(self, name: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        await self._call("POST", "/begin_weight_update", {})

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, version: WeightVersion) -> None:
        # The version is not sent along: the engine is at `version` only after the last bucket (end_weight_update).
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "checksums": bucket.checksums,
            "group_name": group_name,
            "load_format": bucket.load_format,
            "flush_cache": self._flush_on_update,
        }
        await self._call("POST", "/update_weights_from_distributed", body)

    async def update_from_tensor(self, payloads: Sequence[str], *, load_format: str | None) -> None:
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": self._flush_on_update,
        }
        await self._call("POST", "/update_weights_from_tensor", body)

    async def update_from_disk(
        self, folder: Path, *, version: WeightVersion, checksums: Mapping[str, str], load_format: str | None = None
    ) -> None:
        body = {
            "model_path": str(folder),
            "load_format": load_format,
            "weight_version": str(version),
            "flush_cache": self._flush_on_update,
            "checksums": dict(checksums),
        }
        await self._call("POST", "/update_weights_from_disk", body)

    async def end_weight_update(self, version: WeightVersion) -> None:
        await self._call("POST", "/end_weight_update", {})
        await self._call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def checksums(self) -> dict[str, str]:
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"})
        return {name: checksum for rank in answer["ranks"] for name, checksum in rank["checksums"].items()}

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            for session in self._sessions.values():
                await session.close()
        self._sessions = {}

    # -- the wire

    def _session(self, *, idle_s: float) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._sessions, self._loop = {}, loop
        if idle_s not in self._sessions:
            headers = {} if self._address.api_key is None else {"Authorization": f"Bearer {self._address.api_key}"}
            timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            # No limit: the engine queues, and a queue here would only hide it.
            if idle_s == NEW:
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s)
            self._sessions[idle_s] = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self._sessions[idle_s]

    async def _call(self, method: str, path: str, body: Any = None, *, repeat: bool = False) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                first_s = KEEP_ALIVE_S if repeat else MOMENT_S
                return await self._once(method, path, body, idle_s=first_s if attempt == 1 else NEW)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError) as e:
                refused = isinstance(e, aiohttp.ClientConnectorError)
                if not repeat or refused or attempt == ATTEMPTS:
                    raise EngineError(f"{self._at(path)} must answer, got {type(e).__name__}: {e}") from e
                log.info("%s: connection dropped, trying again (%s)", self._at(path), e)
            except aiohttp.ConnectionTimeoutError as e:
                if attempt == ATTEMPTS:
                    rule = f"take a connection within {CONNECT_TIMEOUT_S:g} s"
                    raise EngineError(f"{self._at(path)} must {rule}, got none in {ATTEMPTS} attempts") from e
                log.warning("%s: no connection within %g s, trying again", self._at(path), CONNECT_TIMEOUT_S)
            except TimeoutError as e:
                limit = f"{self._timeout_s:g} s"
                raise EngineError(f"{self._at(path)} must answer within {limit}, got nothing") from e
            except aiohttp.ClientError as e:
                raise EngineError(f"{self._at(path)} must answer, got {type(e).__name__}: {e}") from e
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, body: Any, *, idle_s: float) -> Any:
        async with self._session(idle_s=idle_s).request(method, self._url_of(path), json=body) as response:
            raw = await response.read()
            answer = _decoded(raw)
            if response.status != 200 or (isinstance(answer, Mapping) and answer.get("success") is False):
                self._refused(path, response.status, answer)
            if path == "/generate" and not isinstance(answer, dict | list):
                raise EngineError(f"{self._at(path)} must answer with JSON, got {raw[:200]!r}")
            return answer

    def _refused(self, path: str, status: int, answer: Any) -> None:
        message, kind = str(answer), ""
        if isinstance(answer, Mapping):
            error = answer.get("error")
            if isinstance(error, Mapping):
                message, kind = str(error.get("message", message)), str(error.get("type", ""))
            else:
                message = str(answer.get("message") or error or answer)
        text = f"{self._at(path)} refused with status {status}: {message.strip()}"
        raise (WeightSyncError if kind == WeightSyncError.__name__ else EngineError)(text)

    def _at(self, path: str) -> str:
        return f"{self._owner(path).name} ({self._url_of(path)})"

    def _url_of(self, path: str) -> str:
        return f"{self._owner(path).url.rstrip('/')}{path}"

    def _owner(self, path: str) -> EngineAddress:
        return self._router if path == "/generate" else self._address

    def _admitted(self, num_samples: int) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._limit is None else self._limit.enter(num_samples)

    # -- reading answers

    async def _check(self, input_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuses what would end a real SGLang server: an unknown token id, or min_p where it draws by seed."""
        if self._vocab_size is None:
            info = await self.info()
            self._draws_by_seed = bool(info.get("enable_deterministic_inference", False))
            self._vocab_size = int(info["vocab_size"])
        if self._draws_by_seed and params.min_p > 0:
            raise EngineError(
                f"{self._at('/generate')} min_p must be 0 with SGLang's enable_deterministic_inference, "
                f"got {params.min_p:g}"
            )
        wrong = [token for token in input_ids if not 0 <= token < self._vocab_size]
        if wrong or not input_ids:
            rule = f"be token ids below the engine's vocabulary size {self._vocab_size}"
            raise EngineError(f"{self._at('/generate')} input_ids must {rule}, got {wrong[:5] or 'none'}")

    def _generation(self, answer: Mapping[str, Any], params: SamplingParams, *, num_read: int) -> Generation:
        try:
            meta = answer["meta_info"]
            output_ids = [int(token) for token in answer["output_ids"]]
            logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
            ids_of_logprobs = [int(entry[1]) for entry in meta["output_token_logprobs"]]
            finish = str(meta["finish_reason"]["type"]) if meta["finish_reason"] else ""
            versions = self._versions(meta, len(output_ids)) if finish else []
            routes = self._routes(meta, params, num_tokens=num_read + len(output_ids) - 1) if finish else None
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise EngineError(f"{self._at('/generate')} must answer as SGLang does, got {type(e).__name__}: {e}") from e
        if ids_of_logprobs != output_ids:
            raise EngineError(
                f"{self._at('/generate')} must return one logprob for each output id, got {len(logprobs)} "
                f"for {len(output_ids)} ids or other ids"
            )
        return Generation(
            output_ids=output_ids,
            logprobs=logprobs,
            weight_versions=versions,
            finish_reason=finish,
            text=str(answer.get("text", "")),
            engine=self._router.name,
            routes=routes,
        )

    def _routes(self, meta: Mapping[str, Any], params: SamplingParams, *, num_tokens: int) -> RouteIds | None:
        """Routes of all tokens but the last, where they were asked for. An answer that was aborted may have none."""
        if params.routes is None:
            return None
        text = meta.get("routed_experts")
        if text is not None:
            return decode_routes(text, params.routes, num_tokens=num_tokens)
        if meta["finish_reason"]["type"] == "abort":
            return None
        raise EngineError(
            f"{self._at('/generate')} must return routed_experts, got none; start SGLang with "
            "--enable-return-routed-experts and reach it without sglang-router, which drops the request for them"
        )

    def _versions(self, meta: Mapping[str, Any], num_tokens: int) -> list[WeightVersion]:
        spans = meta.get("weight_versions")
        if not spans:
            return [self._version(meta["weight_version"], "/generate")] * num_tokens
        versions = [self._version(s["version"], "/generate") for s in spans for _ in range(s["start"], s["end"])]
        if len(versions) != num_tokens:
            raise EngineError(f"{self._at('/generate')} weight_versions must cover {num_tokens} tokens, got {spans}")
        return versions

    def _version(self, value: Any, path: str) -> WeightVersion:
        if value == STARTING_VERSION_NAME:
            return 0
        try:
            return int(value)
        except (TypeError, ValueError) as e:
            raise EngineError(f"{self._at(path)} weight_version must be a whole number, got {value!r}") from e

    def _vocab_size_of_folder(self, info: Mapping[str, Any]) -> int:
        # After an update from disk the model path is that of the update, which may hold weights alone.
        configs = [Path(str(info.get(key, ""))) / "config.json" for key in ("model_path", "tokenizer_path")]
        config = next((path for path in configs if path.is_file()), None)
        if config is None:
            raise EngineError(
                f"{self._at('/model_info')} must tell vocab_size, or a model_path that can be read here, "
                f"got {configs[0]}"
            )
        return int(json.loads(config.read_text())["vocab_size"])


def _generate_body(input_ids: Sequence[int], params: SamplingParams, rid: str | None) -> dict[str, Any]:
    body = {"input_ids": list(input_ids), "sampling_params": params.to_wire(), **_returned(params)}
    return body if rid is None else {**body, "rid": rid}


def _batch_body(input_ids: Sequence[int], params: SamplingParams, rid: str | None, *, n: int) -> dict[str, Any]:
    """`n` requests as one batch, sample j with seed + j."""
    assert params.sampling_seed is not None
    each = [replace(params, sampling_seed=params.sampling_seed + j).to_wire() for j in range(n)]
    body = {"input_ids": [list(input_ids)] * n, "sampling_params": each, **_returned(params)}
    return body if rid is None else {**body, "rid": [f"{rid}_{j}" for j in range(n)]}


def _returned(params: SamplingParams) -> dict[str, bool]:
    """What the answer is to bring beside its tokens."""
    routes = {} if params.routes is None else {"return_routed_experts": True}
    return {"return_logprob": True, **routes}


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any]]:
    """The JSON of server-sent events until `[DONE]`. An event may be longer than what a reader takes for a line."""
    rest = b""
    async for chunk in content.iter_any():
        *complete, rest = (rest + chunk).split(b"\n\n")
        for event in complete:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")  # SGLang answers some calls with plain text
