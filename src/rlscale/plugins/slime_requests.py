"""Requests of functions written for slime: `post` to the engines of the run, or to any other server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from rlscale.types import Generation, SamplingParams

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Wait before a request is sent again."""

_PARAMETERS = frozenset(field.name for field in fields(SamplingParams)) - {"routes"}


class SessionTokenizer(Protocol):
    """The part of a tokenizer that requests need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class OpenSession(Protocol):
    """Requests of the trajectory that is generated now: a `GenerateSession`."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tokenizer(self) -> Any: ...

    async def generate(self, token_ids: list[int], params: SamplingParams | None = None) -> Generation: ...


current_session: ContextVar[OpenSession | None] = ContextVar("current_session", default=None)
"""Session of the call of a generate function. Tasks that the function starts inherit it."""

engine_address: ContextVar[tuple[str, int] | None] = ContextVar("engine_address", default=None)
"""`args.sglang_router_ip` and `args.sglang_router_port` of that call."""


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Sends a JSON request and returns the reply.

    A request for `/generate` of the run's own engines joins the requests of the trajectory: it waits for weight
    updates, is sent again when an engine restarts, and its versions are recorded.

    Raises:
        aiohttp.ClientError: the server refused or did not reply, `max_retries` times.
    """
    session = current_session.get()
    parts = urlsplit(url)
    if session is not None and parts.path == "/generate" and (parts.hostname, parts.port) == engine_address.get():
        return await _generate(session, payload or {})
    for attempt in range(max_retries):
        try:
            async with _client() as client, client.post(url, json=payload or {}, headers=headers) as reply:
                reply.raise_for_status()
                return await reply.json(content_type=None)
        except aiohttp.ClientError as error:
            if attempt + 1 == max_retries:
                raise
            log.info("retrying %s after %s", url, error)
            await asyncio.sleep(RETRY_S)
    raise ValueError(f"max_retries must be at least 1, got {max_retries}")


async def get(url: str) -> Any:
    """Requests a URL and returns the JSON reply."""
    async with _client() as client, client.get(url) as reply:
        reply.raise_for_status()
        return await reply.json(content_type=None)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """The URL of an endpoint of the engines of the policy.

    Raises:
        ValueError: it names a frozen model, which user code asks in another way.
    """
    if model_name in (getattr(args, "sglang_frozen_models", None) or ()):
        raise ValueError(
            f"get_model_url must name the policy, got {model_name}; ask that model as session.model({model_name!r}) "
            f"in a generate function, or as judge.model({model_name!r}) in a reward"
        )
    if model_name == getattr(args, "sglang_reward_model", None):
        raise ValueError(
            f"get_model_url must name the policy, got {model_name}; rewards ask that model by their parameter judge"
        )
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def to_document_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as functions in slime's form get them: a new dict, with slime's values for the text."""
    return {
        **params.to_wire(),
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def from_document_params(values: Mapping[str, Any], params: SamplingParams) -> SamplingParams:
    """The parameters of a request, over those of the session.

    Raises:
        ValueError: a parameter is unknown.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(given.keys() - _PARAMETERS):
        raise ValueError(f"sampling_params must have the names {', '.join(sorted(_PARAMETERS))}, got {unknown[0]}")
    for name in ("stop", "stop_token_ids"):
        # None removes the value of the session.
        value = given.get(name, () if name in values else getattr(params, name))
        given[name] = (value,) if isinstance(value, str | int) else tuple(value)
    return replace(params, **given)


def to_wire_reply(answer: Generation, *, num_prompt_tokens: int) -> dict[str, Any]:
    """An answer as SGLang's `/generate` returns it."""
    meta_info: dict[str, Any] = {
        "finish_reason": {"type": answer.finish_reason},
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(answer.output_ids),
        "cached_tokens": 0,
    }
    tokens, logprobs = list(answer.output_ids), list(answer.logprobs)
    meta_info["output_token_logprobs"] = [
        [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
    ]
    if len(answer.weight_versions):
        meta_info["weight_version"] = str(answer.weight_versions[-1])
    return {"text": answer.text, "output_ids": tokens, "meta_info": meta_info}


async def _generate(session: OpenSession, payload: Mapping[str, Any]) -> dict[str, Any]:
    token_ids, text = payload.get("input_ids"), payload.get("text")
    if token_ids is None:
        if not isinstance(text, str) or session.tokenizer is None:
            raise ValueError(f"a request for /generate must have input_ids or text, got {sorted(payload)}")
        token_ids = session.tokenizer.encode(text, add_special_tokens=False)
    params = from_document_params(payload.get("sampling_params") or {}, session.params)
    answer = await session.generate([int(token) for token in token_ids], params)
    return to_wire_reply(answer, num_prompt_tokens=len(token_ids))


def _client() -> aiohttp.ClientSession:
    # One for each request: functions run in several event loops, and a session belongs to one. No proxy: trust_env.
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
