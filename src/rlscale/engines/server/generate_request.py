"""The JSON of `/generate` as the servers of this package speak it: SGLang's names, checked strictly.

A key that would change the answer and is not built is refused, never dropped; a sampling key nobody knows is refused
too, as SGLang does. Unknown keys beside `sampling_params` are accepted, again as SGLang does.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlscale.engines.client.routed_experts import encode_routes
from rlscale.types import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128

# Keys of SGLang's contract that these servers do not act on, with the values that ask for nothing.
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "stop_regex": (None, "", []),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "stream_interval": (None, 1),
}
_NEUTRAL_TOP: dict[str, tuple[Any, ...]] = {
    "logprob_start_len": (-1, None),
    "top_logprobs_num": (0, None),
    "token_ids_logprob": (None, []),
    "input_embeds": (None,),
    "image_data": (None,),
    "video_data": (None,),
    "audio_data": (None,),
    "lora_path": (None,),
    "session_params": (None,),
    "return_hidden_states": (False, None),
    "routed_experts_start_len": (0, None),
    "custom_logit_processor": (None,),
}
_SAMPLING_KEYS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "min_new_tokens",
    "ignore_eos",
    "sampling_seed",
    "n",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
}
MAX_STOP_STRINGS = 32  # SGLang's limit


class BadRequest(ValueError):
    """A request cannot be served as written; answered with status 400. `field` is the JSON path of the mistake."""

    def __init__(self, field: str, rule: str, got: Any) -> None:
        self.field = field
        shown = repr(got)
        super().__init__(f"{field} must {rule}, got {shown if len(shown) <= 200 else shown[:200] + '...'}")


class Refused(RuntimeError):
    """A server cannot do what a well-formed request asks for. `status` is the HTTP status of the answer."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "") -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server can take."""

    vocab_size: int
    max_context_len: int  # prompt and answer together, in tokens
    has_experts: bool = False  # so that there are routes


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One prompt to be answered `n` times."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    return_logprob: bool = False
    return_routes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorUpdate:
    """Weights in memory of this machine. `version` is what the engine holds afterwards, where it is given."""

    payload: str
    load_format: str
    flush: bool
    version: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderUpdate:
    """All weights in a folder, with the checksums they must have (none: they are not compared)."""

    folder: Path
    load_format: str | None
    flush: bool
    version: str | None
    abort_all: bool
    checksums: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Output tokens `start` (included) to `end` (excluded) were made by weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer, finished or as far as it has grown. Lists are [R]."""

    output_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: dict[str, Any] | None  # {"type": "stop" | "length" | "abort", ...}; None: it goes on
    weight_version: str
    num_retractions: int = 0
    seconds: float = 0.0
    # Of an answer that has ended, where the request wants them: [prompt + R - 1, layers, chosen]
    routes: npt.NDArray[np.int16] | None = field(default=None, compare=False)


def parse_generate(
    body: Any, limits: Limits, *, encode: Callable[[str], list[int]] | None = None
) -> tuple[list[GenerateRequest], bool]:
    """The requests of a `/generate` body, and whether it was a batch (then the answer is a list).

    Raises BadRequest naming the field.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("body", "be a JSON object", body)
    for key, neutral in _NEUTRAL_TOP.items():
        if key in body and not _is_neutral(body[key], neutral):
            raise BadRequest(key, f"be left at {neutral[0]!r} on this server", body[key])
    prompts, batched = _prompts(body, encode)
    rids = _rids(body.get("rid"), len(prompts), batched)
    sampling = body.get("sampling_params")
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    if len(each) != len(prompts):
        raise BadRequest("sampling_params", f"have one entry for each of the {len(prompts)} prompts", len(each))
    return_logprob = _bool(body.get("return_logprob", False), "return_logprob")
    return_routes = _bool(body.get("return_routed_experts") or False, "return_routed_experts")
    if return_routes and not limits.has_experts:
        raise BadRequest("return_routed_experts", "be false: the model of this server has no experts", True)
    requests = []
    for rid, ids, raw in zip(rids, prompts, each, strict=True):
        params, n = _sampling({} if raw is None else raw)
        if return_routes and params.max_new_tokens == 0:
            raise BadRequest("return_routed_experts", "be false with max_new_tokens=0, which reads no token", True)
        _check_prompt(ids, params, limits)
        requests.append(
            GenerateRequest(
                rid=rid,
                input_ids=ids,
                params=params,
                n=n,
                return_logprob=return_logprob,
                return_routes=return_routes,
            )
        )
    return requests, batched


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Whether the answer to a `/generate` body is to come as it grows. Raises BadRequest."""
    value = body.get("stream")
    return value is not None and _bool(value, "stream")


def render(request: GenerateRequest, answer: Answer, *, index: int, text: str) -> dict[str, Any]:
    """The JSON object of one answer. `index` is its place among the `n` of its request."""
    meta: dict[str, Any] = {
        "id": request.rid if request.n == 1 else f"{request.rid}_{index}",
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(answer.output_ids),
        "cached_tokens": 0,
        "weight_version": answer.weight_version,
        "num_retractions": answer.num_retractions,
    }
    if answer.finish_reason is not None:
        meta["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in answer.spans]
        meta["e2e_latency"] = answer.seconds
        if request.return_routes and answer.routes is not None:
            meta["routed_experts"] = encode_routes(answer.routes)
    if request.return_logprob:
        meta["input_token_logprobs"] = []
        pairs = zip(answer.logprobs, answer.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": text, "output_ids": answer.output_ids, "meta_info": meta}


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `0 == False` in Python: a boolean only matches a boolean.
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral)


def _prompts(body: Mapping[str, Any], encode: Callable[[str], list[int]] | None) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("input_ids", "be given (or text instead of it)", ids)
    if ids is None:
        if encode is None:
            raise BadRequest("text", "be replaced by input_ids: this server has no tokenizer", text)
        texts: list[Any] = text if isinstance(text, list) else [text]
        for i, one in enumerate(texts):
            if not isinstance(one, str):
                raise BadRequest(f"text[{i}]", "be a string", one)
        return [tuple(encode(one)) for one in texts], isinstance(text, list)
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids", "be a non-empty list of token ids", ids)
    batched = isinstance(ids[0], list)
    rows = ids if batched else [ids]
    for i, row in enumerate(rows):
        if not isinstance(row, list) or not row:
            raise BadRequest(f"input_ids[{i}]", "be a non-empty list of token ids", row)
    return [tuple(row) for row in rows], batched


def _rids(rid: Any, num: int, batched: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(num)]
    if isinstance(rid, str) and rid:
        return [f"{rid}_{i}" for i in range(num)] if batched else [rid]
    if isinstance(rid, list) and len(rid) == num and all(isinstance(r, str) and r for r in rid):
        return rid
    raise BadRequest("rid", "be a non-empty string, or a list with one for each prompt", rid)


def _check_prompt(ids: tuple[int, ...], params: SamplingParams, limits: Limits) -> None:
    if not ids:
        raise BadRequest("input_ids", "hold at least one token id", list(ids))
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            raise BadRequest(f"input_ids[{i}]", f"be a token id below {limits.vocab_size}", token)
    total = len(ids) + params.max_new_tokens
    if total > limits.max_context_len:
        got = f"{len(ids)} prompt tokens + max_new_tokens {params.max_new_tokens}"
        raise BadRequest("input_ids", f"fit with max_new_tokens into {limits.max_context_len} tokens", got)


def _sampling(raw: Any) -> tuple[SamplingParams, int]:
    if not isinstance(raw, Mapping):
        raise BadRequest("sampling_params", "be a JSON object", raw)
    for key, value in raw.items():
        if key in _SAMPLING_KEYS:
            continue
        if key not in _NEUTRAL_SAMPLING:
            raise BadRequest(f"sampling_params.{key}", "be a known sampling parameter", value)
        if not _is_neutral(value, _NEUTRAL_SAMPLING[key]):
            rule = f"be left at {_NEUTRAL_SAMPLING[key][0]!r} on this server"
            raise BadRequest(f"sampling_params.{key}", rule, value)
    given = {key: value for key, value in raw.items() if value is not None}
    params = SamplingParams(
        max_new_tokens=_int(given, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, low=0),
        temperature=_float(given, "temperature", 1.0, low=0.0, high=None),
        top_p=_float(given, "top_p", 1.0, low=0.0, high=1.0),
        top_k=_int(given, "top_k", -1, low=-1),
        min_p=_float(given, "min_p", 0.0, low=0.0, high=1.0),
        stop=_stop_strings(given.get("stop", [])),
        stop_token_ids=_stop_ids(given.get("stop_token_ids", [])),
        min_new_tokens=_int(given, "min_new_tokens", 0, low=0),
        ignore_eos=_flag(given, "ignore_eos", False),
        skip_special_tokens=_flag(given, "skip_special_tokens", True),
        spaces_between_special_tokens=_flag(given, "spaces_between_special_tokens", True),
        no_stop_trim=_flag(given, "no_stop_trim", False),
        sampling_seed=_int(given, "sampling_seed", 0, low=-(2**63)) if "sampling_seed" in given else None,
    )
    if params.top_p == 0.0:
        raise BadRequest("sampling_params.top_p", "be above 0 and at most 1", params.top_p)
    if params.top_k == 0:
        raise BadRequest("sampling_params.top_k", "be at least 1, or -1 for off", params.top_k)
    if params.min_new_tokens > params.max_new_tokens:
        rule = f"be at most max_new_tokens ({params.max_new_tokens})"
        raise BadRequest("sampling_params.min_new_tokens", rule, params.min_new_tokens)
    return params, _int(given, "n", 1, low=1)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    # An empty string is in every text: the answer would end before it has begun.
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise BadRequest("sampling_params.stop", "be a non-empty string or a list of them", value)
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest("sampling_params.stop", f"have at most {MAX_STOP_STRINGS} entries", len(strings))
    return tuple(strings)


def _stop_ids(value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not good:
        raise BadRequest("sampling_params.stop_token_ids", "be a list of token ids", value)
    return tuple(value)


def _int(given: Mapping[str, Any], key: str, default: int, *, low: int) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or value >= 2**63:
        raise BadRequest(f"sampling_params.{key}", f"be an integer of at least {low}", value)
    return value


def _float(given: Mapping[str, Any], key: str, default: float, *, low: float, high: float | None) -> float:
    value = given.get(key, default)
    limit = "" if high is None else f" and at most {high:g}"
    # Written so that NaN fails too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= (high or 1e9):
        raise BadRequest(f"sampling_params.{key}", f"be a number of at least {low:g}{limit}", value)
    return float(value)


def _flag(given: Mapping[str, Any], key: str, default: bool) -> bool:
    return _bool(given.get(key, default), f"sampling_params.{key}")


def _bool(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(field, "be true or false", value)
    return value
