"""State and default generation of slime, for functions that call them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rlscale.plugins.sample_view import DocumentSample
from rlscale.plugins.slime_requests import current_session, post, to_document_params


class GenerateState:
    """slime's state of generation: tokenizer, sampling parameters and a limit of concurrent requests.

    Instances are cheap and share the tokenizer and the limit. `aborted` is always false: an ended rollout answers
    requests with finish reason `abort`.
    """

    aborted = False
    processor = None
    dp_rank = 0

    def __init__(self, args: Any) -> None:
        self.args = args
        session = current_session.get()
        known = None if session is None else session.tokenizer
        self.tokenizer = load_slime_tokenizer(args.hf_checkpoint) if known is None else known
        self.semaphore = _limit(args.sglang_server_concurrency * (args.rollout_num_engines or 1))
        self.sampling_params = {} if session is None else to_document_params(session.params)

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank of an engine: the router chooses it."""
        yield self.dp_rank

    def reset(self) -> None:
        """Does nothing: the loop of rlscale has its state."""


async def generate(args: Any, sample: DocumentSample, sampling_params: dict[str, Any]) -> DocumentSample:
    """One request for the rest of a response, as slime's default."""
    tokenizer = GenerateState(args).tokenizer
    prompt = list(sample.tokens) or tokenizer.encode(sample.prompt, add_special_tokens=False)
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = DocumentSample.Status.TRUNCATED
        return sample
    sample.tokens = prompt
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {
        "input_ids": prompt,
        "sampling_params": sampling_params | {"max_new_tokens": left},
        "return_logprob": True,
    }
    output = await post(url, payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


def load_slime_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a folder or hub id, loaded once; further arguments of transformers are ignored."""
    return _load_tokenizer(name_or_path)


@cache
def _load_tokenizer(name_or_path: str) -> Any:
    # Imported here: transformers takes two seconds, and a session has its tokenizer.
    from rlscale.models.hf_models import load_tokenizer

    return load_tokenizer(name_or_path)


@cache
def _limit(number: int) -> asyncio.Semaphore:
    # A semaphore belongs to the event loop in which it first waits: that of all generate functions.
    return asyncio.Semaphore(number)
