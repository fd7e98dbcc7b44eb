"""Sampling parameters of a request: those of the run, whatever the client asks for.

Engines report logprobs under the temperature of the request, and the trainer computes those of the run's temperature.
So another temperature would falsify every importance ratio. Agents set one all the same, and cannot be changed: their
value is ignored, and the response says so in the header `x-rlscale-ignored`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.types import SamplingParams

IGNORED_HEADER = "x-rlscale-ignored"

_PENALTIES = ("frequency_penalty", "presence_penalty")


def run_params(request: ChatRequest, params: SamplingParams) -> SamplingParams:
    """Parameters of a call: those of the run, with the client's stop strings.

    Raises:
        InvalidRequest: a penalty that the run does not have.
    """
    for name in _PENALTIES:
        given, own = request.sampling.get(name), getattr(params, name)
        if given is not None and given != own:
            raise InvalidRequest(
                f"{name} must be {own:g}, as in the run, got {given:g}; a penalty changes the recorded logprobs",
                param=name,
            )
    stop = tuple(dict.fromkeys((*params.stop, *request.stop)))
    return replace(params, stop=stop)


def ignored_parameters(request: ChatRequest, params: SamplingParams) -> tuple[str, ...]:
    """Names of the parameters that the client gave and that have no effect."""
    sampling = [
        name
        for name, value in request.sampling.items()
        if name not in _PENALTIES and (name == "seed" or value != getattr(params, name))
    ]
    return (*request.ignored, *sampling)


def ids_digest(token_ids: Sequence[int]) -> bytes:
    """A short name of the ids of a call."""
    return hashlib.blake2b(np.asarray(token_ids, "<i4").tobytes(), digest_size=16).digest()


def call_seed(seed: int, digest: bytes, occurrence: int) -> int:
    """Seed of a call. A repeated call has the same one, and concurrent calls do not depend on their order.

    Args:
        digest: of its ids.
        occurrence: number of the call among those of the session with the same ids.
    """
    text = f"{seed}/{occurrence}/".encode() + digest
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % 2**31
