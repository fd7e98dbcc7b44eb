"""Bodies of `/generate` calls, and the parsing of their responses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlscale.engines.client.routed_experts import decode_routes
from rlscale.errors import EngineError
from rlscale.expert_routes import RouteIds
from rlscale.types import Generation, SamplingParams, WeightVersion

INITIAL_VERSION_NAME = "default"  # SGLang's version name for the weights that it loads at start


def build_body(
    input_ids: Sequence[int],
    params: SamplingParams,
    rids: Sequence[str] | None,
    *,
    n: int = 1,
    adapter: str | None = None,
) -> dict[str, Any]:
    """One request for `n` samples.

    Args:
        rids: its id; None: the engine chooses one.
        adapter: its name, or that of one of its versions on SGLang; None: that of the engine's only policy.
    """
    sampling = params.to_wire() if n == 1 else {**params.to_wire(), "n": n}
    body = {"input_ids": list(input_ids), "sampling_params": sampling, **_return_options(params)}
    if params.images:
        body["image_data"] = [image.data_url() for image in params.images]
    if adapter is not None:
        body["lora_path"] = adapter
    return body if rids is None else {**body, "rid": rids[0]}


def build_batch_body(
    input_ids: Sequence[int],
    params: SamplingParams,
    rids: Sequence[str] | None,
    *,
    n: int,
    adapter: str | None = None,
) -> dict[str, Any]:
    """`n` requests as one batch, sample j with seed + j if there is a seed, and the id `rids[j]`."""
    seed = params.sampling_seed
    each = [replace(params, sampling_seed=None if seed is None else seed + j).to_wire() for j in range(n)]
    body = {"input_ids": [list(input_ids)] * n, "sampling_params": each, **_return_options(params)}
    if params.images:
        body["image_data"] = [[image.data_url() for image in params.images]] * n
    if adapter is not None:
        body["lora_path"] = adapter
    return body if rids is None else {**body, "rid": list(rids)}


def parse_generation(
    answer: Mapping[str, Any],
    params: SamplingParams,
    *,
    prompt_len: int,
    endpoint: str,
    engine: str,
    version: WeightVersion | None = None,
) -> Generation:
    """The generation in one object of a response.

    Args:
        version: of the adapter that the request names; None: the response states the version of each token.
        endpoint: name and URL of `/generate`, for errors.
        engine: name of the engine or router that answered.
    """
    try:
        meta = answer["meta_info"]
        output_ids = list(map(int, answer["output_ids"]))
        entries = meta["output_token_logprobs"]
        # Entries are (logprob, id, text); zip makes columns of them faster than a loop over the entries.
        values, ids, *_ = zip(*entries, strict=True) if entries else ((), ())
        logprobs, ids_of_logprobs = list(map(float, values)), list(map(int, ids))
        num_read = meta.get("prompt_tokens") if params.images else None
        finish = str(meta["finish_reason"]["type"]) if meta["finish_reason"] else ""
        versions = _parse_versions(meta, len(output_ids), endpoint) if finish else []
        if version is not None:
            versions = [version] * len(versions)  # SGLang states that of the newest adapter for every request
        # The last token was never an input, so it has no routes.
        num_tokens = prompt_len + len(output_ids) - 1
        routes = _parse_routes(meta, params, num_tokens=num_tokens, endpoint=endpoint) if finish else None
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise EngineError(f"{endpoint} must answer as SGLang does, got {type(e).__name__}: {e}") from e
    if num_read is not None and num_read != prompt_len:
        raise EngineError(
            f"{endpoint} must read {prompt_len} prompt tokens, got {num_read}: its image processor makes other "
            "placeholders; give engine and trainer the same model.hf_checkpoint and version of transformers"
        )
    if ids_of_logprobs != output_ids:
        raise EngineError(
            f"{endpoint} must return one logprob for each output id, got {len(logprobs)} "
            f"for {len(output_ids)} ids or other ids"
        )
    return Generation(
        output_ids=output_ids,
        logprobs=logprobs,
        weight_versions=versions,
        finish_reason=finish,
        text=str(answer.get("text", "")),
        engine=engine,
        routes=routes,
        queued_s=_parse_queue_time(meta),
    )


def _parse_queue_time(meta: Mapping[str, Any]) -> float:
    """Seconds that SGLang held the request before its prefill, in versions that report it."""
    seconds = meta.get("queue_time")
    return float(seconds) if isinstance(seconds, int | float) and 0 < seconds < float("inf") else 0.0


def parse_version(value: Any, endpoint: str) -> WeightVersion:
    if value == INITIAL_VERSION_NAME:
        return 0
    try:
        return int(value)
    except (TypeError, ValueError) as e:
        raise EngineError(f"{endpoint} weight_version must be a whole number, got {value!r}") from e


def _return_options(params: SamplingParams) -> dict[str, bool]:
    """Options for the contents of the response in addition to its tokens."""
    routes = {} if params.routes is None else {"return_routed_experts": True}
    return {"return_logprob": True, **routes}


def _parse_routes(
    meta: Mapping[str, Any], params: SamplingParams, *, num_tokens: int, endpoint: str
) -> RouteIds | None:
    """Routes of all tokens but the last, if requested. An aborted answer may have none."""
    if params.routes is None:
        return None
    text = meta.get("routed_experts")
    if text is not None:
        return decode_routes(text, params.routes, num_tokens=num_tokens)
    if meta["finish_reason"]["type"] == "abort":
        return None
    raise EngineError(
        f"{endpoint} must return routed_experts, got none; start SGLang with "
        "--enable-return-routed-experts and connect to it without sglang-router, which drops this option"
    )


def _parse_versions(meta: Mapping[str, Any], num_tokens: int, endpoint: str) -> list[WeightVersion]:
    """The weight version of each output token."""
    spans = meta.get("weight_versions")
    if not spans:
        return [parse_version(meta["weight_version"], endpoint)] * num_tokens
    versions: list[WeightVersion] = []
    for span in spans:
        versions += [parse_version(span["version"], endpoint)] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise EngineError(f"{endpoint} weight_versions must cover {num_tokens} tokens, got {spans}")
    return versions
