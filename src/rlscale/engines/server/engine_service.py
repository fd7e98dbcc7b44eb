"""The HTTP endpoints of the embedded engine and the fake: SGLang's API over an `EngineService`."""

import asyncio
import hmac
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rlscale.engines.server.generate_request import (
    Answer,
    BadRequest,
    FolderUpdate,
    GenerateRequest,
    Limits,
    Refused,
    TensorUpdate,
    parse_generate,
    render_answer,
    wants_stream,
)
from rlscale.engines.server.server_name import SERVER_KEY, SERVER_NAME
from rlscale.engines.server.stop_conditions import answer_text
from rlscale.engines.server.streaming import stream_answers
from rlscale.errors import WeightSyncError
from rlscale.weight_types import AdapterUpdate, WeightBucket, WeightGroup

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 2**20
PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_TAGS = ("weights", "kv_cache")
DEFAULT_GROUP_TIMEOUT_S = 300.0
BUCKET_FORMATS = ("flattened_bucket", "tensor_blocks")
TENSOR_FORMATS = ("shared_memory", "cuda_ipc")
FLUSH_POLL_S = 0.01
ADAPTER_FORMATS = ("safetensors",)
FOLDER_FORMATS = (None, "auto", "safetensors", "delta")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Number of running and waiting sequences of a server."""

    running: int
    waiting: int


class EngineService(Protocol):
    """The operations of a server. Methods raise `Refused` when an operation is impossible now."""

    limits: Limits

    async def generate(self, request: GenerateRequest) -> list[Answer]: ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        """Yields growing states of the `n` answers with their index; the last state of each is finished.

        The request is aborted when the iterator is closed or cancelled.
        """
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...

    async def abort(self, rid: str | None, *, adapter: str | None = None) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self, tags: Collection[str]) -> None:
        """Frees the memory of `tags` (of `MEMORY_TAGS`). No request may run; requests that wait in a pause are kept."""
        ...

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Allocates the memory again. Weights are then unusable until all of them have been sent."""
        ...

    async def join_group(self, group: WeightGroup, rank: int) -> None: ...

    async def leave_group(self, name: str) -> None: ...

    async def begin_update(self) -> None: ...

    async def receive_bucket(
        self, bucket: WeightBucket, *, group_name: str, flush: bool, version: str | None
    ) -> None: ...

    async def receive_tensors(self, update: TensorUpdate) -> None: ...

    async def load_folder(self, update: FolderUpdate) -> None: ...

    async def end_update(self) -> None: ...

    async def load_adapter(self, update: AdapterUpdate) -> None:
        """Makes an adapter the current version of its name. Running requests keep the version that they began with."""
        ...

    async def unload_adapter(self, name: str) -> None: ...

    async def set_version(self, version: str, *, abort_all: bool) -> None: ...

    async def checksums(self) -> dict[str, str]: ...

    async def info(self) -> dict[str, Any]:
        """Properties of the server, at least model_path, weight_version, vocab_size, max_context_len."""
        ...

    def load(self) -> Load: ...

    def health(self) -> str | None:
        """The reason why the server is unhealthy, or None."""
        ...


def build_app(service: EngineService, *, api_key: str | None = None) -> web.Application:
    """Builds the web application of a server. With `api_key`, all endpoints but /health require it as bearer token."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_require_key(api_key), _errors_to_json])
    handlers = _Handlers(service)
    app.add_routes(
        [
            web.get("/health", handlers.health),
            web.get("/health_generate", handlers.health_generate),
            web.get("/model_info", handlers.info),
            web.get("/server_info", handlers.info),
            web.get("/v1/models", handlers.models),
            web.get("/v1/loads", handlers.loads),
            web.post("/generate", handlers.generate),
            web.post("/flush_cache", handlers.flush_cache),
            web.get("/flush_cache", handlers.flush_cache),
            web.post("/pause_generation", handlers.pause),
            web.post("/continue_generation", handlers.resume),
            web.post("/abort_request", handlers.abort),
            web.post("/release_memory_occupation", handlers.release_memory),
            web.post("/resume_memory_occupation", handlers.resume_memory),
            web.post("/init_weights_update_group", handlers.join_group),
            web.post("/destroy_weights_update_group", handlers.leave_group),
            web.post("/begin_weight_update", handlers.begin_update),
            web.post("/update_weights_from_distributed", handlers.receive_bucket),
            web.post("/update_weights_from_tensor", handlers.receive_tensors),
            web.post("/update_weights_from_disk", handlers.load_folder),
            web.post("/end_weight_update", handlers.end_update),
            web.post("/update_weight_version", handlers.set_version),
            web.post("/load_lora_adapter_from_tensors", handlers.load_adapter),
            web.post("/unload_lora_adapter", handlers.unload_adapter),
            web.post("/weights_checker", handlers.weights_checker),
        ]
    )
    return app


def _require_key(api_key: str | None) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A browser sends requests of any page to loopback, too, where a server may have no key.
        if "Origin" in request.headers:
            return web.json_response({"error": {"message": "requests of web pages are refused"}}, status=403)
        if api_key is not None and request.path != "/health":
            # Anthropic's clients send the key in another header.
            other = request.headers.get("x-api-key")
            given = request.headers.get("Authorization", "" if other is None else f"Bearer {other}")
            # A header may have bytes that are no UTF-8.
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {api_key}".encode()):
                return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        return await handler(request)

    return check


@web.middleware
async def _errors_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as e:
        return _failure_response(str(e), 400, field=e.field)
    except WeightSyncError as e:
        return _failure_response(str(e), 400, kind="WeightSyncError")
    except Refused as e:
        return _failure_response(str(e), e.status, kind=e.kind)
    except web.HTTPException:
        raise
    except Exception as e:
        log.exception("%s failed", request.path)
        return _failure_response(f"{type(e).__name__}: {e}", 500)


def _failure_response(message: str, status: int, *, field: str = "", kind: str = "") -> web.Response:
    # SGLang uses `error` for /generate and `success` for the weight endpoints; a client may read either.
    error = {"message": message, "type": kind or ("BadRequest" if status == 400 else "Error")}
    if field:
        error["field"] = field
    return web.json_response({"success": False, "message": message, "error": error}, status=status)


def _success_response(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})


class _Handlers:
    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def health(self, request: web.Request) -> web.Response:
        fault = self._service.health()
        return web.Response(status=200) if fault is None else _failure_response(fault, 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        fault = self._service.health()
        if fault is not None:
            return _failure_response(fault, 503)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        requests, _ = parse_generate(body, self._service.limits)
        await self._service.generate(requests[0])
        return web.Response(status=200)

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({SERVER_KEY: SERVER_NAME, **await self._service.info()})

    async def models(self, request: web.Request) -> web.Response:
        info = await self._service.info()
        model = {
            "id": info.get("served_model_name", info["model_path"]),
            "object": "model",
            "owned_by": "rlscale",
            "root": info["model_path"],
            "max_model_len": self._service.limits.max_context_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def loads(self, request: web.Request) -> web.Response:
        load = self._service.load()
        one = {"dp_rank": 0, "num_running_reqs": load.running, "num_waiting_reqs": load.waiting}
        return web.json_response({"dp_rank_count": 1, "loads": [one]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        body = await _body(request)
        requests, batched = parse_generate(body, service.limits, encode=service.encode)
        if wants_stream(body):
            return await stream_answers(request, service, requests, many=batched or requests[0].n > 1)
        tasks = [asyncio.ensure_future(self._answer(r)) for r in requests]
        try:
            answered = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()  # one failed, or the client disconnected: no one waits for the others
            raise
        objects = [o for answers in answered for o in answers]
        return web.json_response(objects if batched or requests[0].n > 1 else objects[0])

    async def _answer(self, request: GenerateRequest) -> list[dict[str, Any]]:
        service = self._service
        answers = await service.generate(request)
        texts = [answer_text(a.output_ids, a.finish_reason, request.params, service.decode) for a in answers]
        return [render_answer(request, a, index=i, text=t) for i, (a, t) in enumerate(zip(answers, texts, strict=True))]

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Flushes the cache. `?timeout=<seconds>` waits for running requests; without it the flush fails at once."""
        timeout_s = _seconds(request.query.get("timeout", "0"), key="timeout")
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self._service.flush_cache()
                return web.Response(text="Cache flushed.\n")
            except Refused:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(FLUSH_POLL_S)

    async def pause(self, request: web.Request) -> web.Response:
        mode = _get(await _body(request), "mode", str, "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest("mode", f"be one of {', '.join(PAUSE_MODES)}", mode)
        await self._service.pause(mode)
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def resume(self, request: web.Request) -> web.Response:
        await self._service.resume()
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        all_requests = _get(body, "abort_all", bool, False)
        rid = _get(body, "rid", str, "")
        if not all_requests and not rid:
            raise BadRequest("rid", "name a request, unless abort_all is true", rid)
        # As `lora_name` elsewhere: with it only requests of that adapter end.
        await self._service.abort(None if all_requests else rid, adapter=_get(body, "lora_name", str, None))
        return web.Response(status=200)

    async def release_memory(self, request: web.Request) -> web.Response:
        await self._service.release_memory(_tags(await _body(request)))
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        await self._service.resume_memory(_tags(await _body(request)))
        return web.json_response(None)

    async def join_group(self, request: web.Request) -> web.Response:
        body = await _body(request)
        group = WeightGroup(
            name=_get(body, "group_name", str, "weight_update_group"),
            master_address=_get(body, "master_address", str),
            master_port=_get(body, "master_port", int),
            world_size=_get(body, "world_size", int),
            backend=_get(body, "backend", str, "nccl"),
            timeout_s=_get(body, "timeout_s", float, DEFAULT_GROUP_TIMEOUT_S),
            num_links=_get(body, "num_links", int, 1),
        )
        await self._service.join_group(group, _get(body, "rank_offset", int))
        return _success_response("Succeeded to initialize custom process group.")

    async def leave_group(self, request: web.Request) -> web.Response:
        await self._service.leave_group(_get(await _body(request), "group_name", str, "weight_update_group"))
        return _success_response("Succeeded to destroy custom process group.")

    async def begin_update(self, request: web.Request) -> web.Response:
        await self._service.begin_update()
        return _success_response("Weight update has begun.")

    async def receive_bucket(self, request: web.Request) -> web.Response:
        body = await _body(request)
        load_format = body.get("load_format")
        if load_format not in BUCKET_FORMATS:
            known = " or ".join(repr(name) for name in BUCKET_FORMATS)
            raise BadRequest("load_format", f"be {known} on this server", load_format)
        bucket = WeightBucket(
            names=_get(body, "names", list),
            dtypes=_get(body, "dtypes", list),
            shapes=_get(body, "shapes", list),
            checksums=_get(body, "checksums", list, []),
            load_format=load_format,
        )
        num = len(bucket.names)
        for field in ("dtypes", "shapes", "checksums"):
            if len(getattr(bucket, field)) != num and (field != "checksums" or bucket.checksums):
                raise BadRequest(field, f"have {num} entries, one for each name", len(getattr(bucket, field)))
        await self._service.receive_bucket(
            bucket,
            group_name=_get(body, "group_name", str, "weight_update_group"),
            flush=_get(body, "flush_cache", bool, True),
            version=_version(body),
        )
        return _success_response("Succeeded to update parameter online.")

    async def receive_tensors(self, request: web.Request) -> web.Response:
        body = await _body(request)
        load_format = body.get("load_format")
        if load_format not in TENSOR_FORMATS:
            known = " or ".join(repr(name) for name in TENSOR_FORMATS)
            raise BadRequest(
                "load_format", f"be {known}: SGLang's own formats are pickles, which are unsafe to read", load_format
            )
        update = TensorUpdate(
            payload=_one_payload(body),
            load_format=load_format,
            flush=_get(body, "flush_cache", bool, True),
            version=_version(body),
        )
        await self._service.receive_tensors(update)
        return _success_response("Success")

    async def load_folder(self, request: web.Request) -> web.Response:
        body = await _body(request)
        load_format = body.get("load_format")
        if load_format not in FOLDER_FORMATS:
            known = ", ".join(repr(name) for name in FOLDER_FORMATS if name is not None)
            raise BadRequest("load_format", f"be omitted or be one of {known} on this server", load_format)
        update = FolderUpdate(
            folder=Path(_get(body, "model_path", str)),
            load_format=load_format,
            flush=_get(body, "flush_cache", bool, True),
            version=_version(body),
            abort_all=_get(body, "abort_all_requests", bool, False),
            checksums=_get(body, "checksums", dict, {}),
        )
        await self._service.load_folder(update)
        return _success_response("Succeeded to update model weights.", num_paused_requests=0)

    async def end_update(self, request: web.Request) -> web.Response:
        await self._service.end_update()
        return _success_response("Weight update has ended.")

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await _body(request)
        load_format = body.get("load_format")
        if load_format not in ADAPTER_FORMATS:
            rule = "be 'safetensors': SGLang's own format is a pickle, which is unsafe to read"
            raise BadRequest("load_format", rule, load_format)
        name, num_kept = _get(body, "lora_name", str), _get(body, "num_kept", int, 1)
        if not name or "@" in name:
            raise BadRequest("lora_name", "be a name without '@', which separates the version", name)
        if num_kept < 1:
            raise BadRequest("num_kept", "be at least 1", num_kept)
        update = AdapterUpdate(
            name=name,
            version=_version(body) or "default",
            config=_get(body, "config_dict", dict),
            payload=_one_payload(body),
            checksums=_get(body, "checksums", dict, {}),
            num_kept=num_kept,
        )
        await self._service.load_adapter(update)
        return _success_response(f"Loaded adapter {name} as version {update.version}.")

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = _get(await _body(request), "lora_name", str)
        await self._service.unload_adapter(name)
        return _success_response(f"Unloaded adapter {name}.")

    async def set_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = _get(body, "new_version", str)
        await self._service.set_version(version, abort_all=_get(body, "abort_all_requests", bool, False))
        return _success_response(f"Weight version updated to {version}", new_version=version)

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = _get(await _body(request), "action", str)
        if action != "checksum":
            raise BadRequest("action", "be 'checksum' on this server", action)
        checksums = await self._service.checksums()
        # SGLang's format, but another algorithm and Hugging Face names; see `compares_checksums` of the info.
        return _success_response("Success.", checksums=checksums, ranks=[{"checksums": checksums}])


def _tags(body: Mapping[str, Any]) -> list[str]:
    tags: list[str] = _get(body, "tags", list, []) or list(MEMORY_TAGS)
    if not all(tag in MEMORY_TAGS for tag in tags):
        raise BadRequest("tags", f"be among {', '.join(MEMORY_TAGS)}", tags)
    return tags


def _one_payload(body: Mapping[str, Any]) -> str:
    """SGLang's clients send one string for each rank of the server; these servers have one."""
    payloads = _get(body, "serialized_named_tensors", list)
    if len(payloads) != 1 or not isinstance(payloads[0], str):
        raise BadRequest("serialized_named_tensors", "contain one string, for the one rank of this server", payloads)
    return str(payloads[0])


def _version(body: Mapping[str, Any]) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest("body", "be JSON", str(e)) from e
    if not isinstance(body, Mapping):
        raise BadRequest("body", "be a JSON object", body)
    return body


def _seconds(text: str, *, key: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(key, "be seconds >= 0", text)
    return seconds


_REQUIRED: Any = object()


def _get(body: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = body.get(key, default)
    if value is None and default is not _REQUIRED:
        return default
    # JSON has no separate integers and floats; Python counts True as an int.
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if value is _REQUIRED or not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise BadRequest(key, f"be given as {kind.__name__}", None if value is _REQUIRED else value)
    return value
