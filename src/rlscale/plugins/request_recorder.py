"""Requests of one call of a generate function, recorded: they show which weights generated which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlscale.plugins.slime_requests import OpenSession
from rlscale.types import Generation, SamplingParams, WeightVersion

SEED_STEP = 1_000_003
"""Added to the seed of a trajectory for each further request: equal requests get different answers."""


@dataclass(eq=False, slots=True)
class RecordedRequest:
    """A request and its answer."""

    token_ids: list[int]
    answer: Generation
    is_used: bool = False  # its tokens are trained in a sample


class Placement(NamedTuple):
    """Tokens of a sample that a request generated."""

    start: int  # in the tokens of the sample
    num_tokens: int
    request: RecordedRequest
    is_exact: bool  # the tokens before it are those of the request


@dataclass(eq=False)
class RequestRecorder:
    """An `OpenSession` that records its requests.

    With `only_exact` an answer stands only after the tokens of its request: for many trajectories in one session.
    """

    session: OpenSession
    only_exact: bool = False
    requests: list[RecordedRequest] = field(default_factory=list)
    _num_started: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.session.params

    @property
    def oldest_version(self) -> WeightVersion:
        return getattr(self.session, "oldest_version", 0)

    @property
    def tokenizer(self) -> Any:
        return self.session.tokenizer

    async def generate(self, token_ids: list[int], params: SamplingParams | None = None) -> Generation:
        """See `GenerateSession.generate`."""
        number, self._num_started = self._num_started, self._num_started + 1
        params = params or self.params
        if number and params.sampling_seed is not None and params.sampling_seed == self.params.sampling_seed:
            params = replace(params, sampling_seed=(params.sampling_seed + number * SEED_STEP) % 2**31)
        answer = await self.session.generate(token_ids, params)
        self.requests.append(RecordedRequest(list(token_ids), answer))
        return answer

    def place(self, tokens: Sequence[int]) -> list[Placement]:
        """The places of the answers in the tokens of a sample; of equal answers the first that no sample trains."""
        tokens, placements, end = list(tokens), list[Placement](), 0
        for request in sorted(self.requests, key=lambda each: each.is_used):
            output = request.answer.output_ids
            start = len(request.token_ids)
            # Cheap first: a rollout has thousands of requests and samples.
            if self.only_exact and not (output and start < len(tokens) and tokens[start] == output[0]):
                continue
            is_exact = bool(output) and tokens[:start] == request.token_ids
            num_equal = _num_equal(tokens, start, output)
            if self.only_exact and not is_exact:
                continue
            if not (is_exact and num_equal) and num_equal < len(output):
                # The function sent text, or changed tokens before these.
                is_exact, num_equal = False, len(output)
                start = _find(tokens, output, end)
            is_free = all(
                start + num_equal <= each.start or each.start + each.num_tokens <= start for each in placements
            )
            if output and start >= 0 and num_equal and is_free:
                placements.append(Placement(start, num_equal, request, is_exact))
                end = max(end, start + num_equal)
        return placements


def _num_equal(tokens: Sequence[int], start: int, output: Sequence[int]) -> int:
    """Number of first tokens of `output` that stand at `start`."""
    pairs = zip(tokens[start : start + len(output)], output, strict=False)
    return next(
        (number for number, (a, b) in enumerate(pairs) if a != b), min(len(output), max(0, len(tokens) - start))
    )


def _find(tokens: list[int], output: Sequence[int], start: int) -> int:
    """Position of `output` in `tokens`, not before `start`; -1: it is not there."""
    output = list(output)
    while output:
        try:
            start = tokens.index(output[0], start)
        except ValueError:
            break
        if tokens[start : start + len(output)] == output:
            return start
        start += 1
    return -1
