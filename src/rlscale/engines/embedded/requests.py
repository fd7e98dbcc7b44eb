"""Requests in the decode thread: their sequences, and prompts to be computed."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rlscale.engines.embedded.kv_cache import PromptCache
from rlscale.engines.embedded.row_adapters import LoraAdapter
from rlscale.engines.embedded.sampling import RowParams
from rlscale.engines.server.generate_request import Answer, GenerateRequest, PromptScores, VersionSpan
from rlscale.engines.server.stop_conditions import Decode, find_finish_reason
from rlscale.images import Image

StreamCallback = Callable[[int, Answer], None]
"""Called in the decode thread after each token: (index among the `n` answers, a copy of the answer so far)."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One of the `n` answers of a request while it grows."""

    request: "Request"
    index: int
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)  # of each token in `ids`; only with penalties
    versions: list[tuple[str, int]] = field(default_factory=list)  # weight version, and the index of its first token
    num_retractions: int = 0
    finish: dict[str, object] | None = None
    # Experts of all input tokens, so of all tokens but the last, if requested: parts [n, L, K]
    routes: list[npt.NDArray[np.int16]] = field(default_factory=list)

    @property
    def wants_routes(self) -> bool:
        return self.request.spec.return_routes

    def set_params(self, params: RowParams, row: int) -> None:
        """Sets `row` to the sampling parameters of this sequence."""
        request = self.request
        params.set(
            row,
            request.spec.params,
            self.seed,
            blocked_until=request.blocked_until,
            blocked_ids=request.blocked_ids,
            counts=self.counts,
        )

    def append(self, token: int, logprob: float, version: str) -> None:
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.ids)))
        self.ids.append(token)
        if self.request.spec.params.has_penalties:
            self.counts[token] = self.counts.get(token, 0) + 1
        self.logprobs.append(logprob)

    def spans(self) -> list[VersionSpan]:
        # A span ends at the first token of the next version.
        starts = [start for _, start in self.versions]
        ends = [*starts[1:], len(self.ids)]
        return [VersionSpan(version=v, start=starts[i], end=ends[i]) for i, (v, _) in enumerate(self.versions)]


@dataclass(eq=False, slots=True)
class Request:
    """An open request. `future` receives its answers, in order, when all are finished, or the error.

    `stop_ids` end an answer; `blocked_ids` have probability 0 for the first `min_new_tokens` tokens.
    """

    spec: GenerateRequest
    stop_ids: frozenset[int]
    blocked_ids: tuple[int, ...]
    decode: Decode
    adapter: LoraAdapter | None  # of every token; None: those of the base
    future: "Future[list[Answer]]"
    on_token: StreamCallback | None = None
    sequences: list[Sequence] = field(default_factory=list)
    num_open: int = 0
    scores: PromptScores | None = None  # of the input tokens, if requested
    # Rotary positions of generated tokens minus their positions in the cache: an image has fewer than it has tokens.
    rotary_offset: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def version(self, current: str) -> str:
        """Version of the weights that generate its next token; `current` is that of the base."""
        return current if self.adapter is None else self.adapter.version

    @property
    def total_len(self) -> int:
        """Maximum number of tokens of a sequence of this request, prompt included."""
        return len(self.spec.input_ids) + self.spec.params.max_new_tokens

    @property
    def blocked_until(self) -> int:
        """First position, counted from the first token of the prompt, at which `blocked_ids` may be drawn."""
        return len(self.spec.input_ids) + self.spec.params.min_new_tokens

    def finish_of(self, sequence: Sequence) -> dict[str, object] | None:
        """The reason why `sequence` ends with its last token; None: it continues."""
        end: dict[str, object] | None = find_finish_reason(sequence.ids, self.spec.params, self.stop_ids, self.decode)
        return end

    def notify(self, sequence: Sequence, version: str) -> None:
        """Passes the current state of `sequence` to `on_token`."""
        if self.on_token is not None:
            self.on_token(sequence.index, self.answer(sequence, version))

    def answers(self, version: str) -> list[Answer]:
        return [self.answer(s, version) for s in self.sequences]

    def answer(self, sequence: Sequence, version: str) -> Answer:
        """A copy of the current state: the sequence may continue to grow in the decode thread."""
        spans = sequence.spans()
        has_routes = bool(sequence.routes) and sequence.finish is not None
        return Answer(
            output_ids=sequence.ids.copy(),
            logprobs=sequence.logprobs.copy(),
            spans=spans,
            finish_reason=sequence.finish,
            weight_version=spans[-1].version if spans else version,
            num_retractions=sequence.num_retractions,
            seconds=time.monotonic() - self.started_s,
            routes=np.concatenate(sequence.routes) if has_routes else None,
            scores=self.scores,
        )


@dataclass(eq=False, slots=True)
class PrefillJob:
    """Tokens to be computed once, and the sequences that continue from them.

    `cache`, of this prompt, and `logits` [V] are set by the prefill, and `routes` if requested.
    """

    tokens: tuple[int, ...]
    sequences: deque[Sequence]
    adapter: LoraAdapter | None = None
    images: tuple[Image, ...] = ()
    cache: PromptCache | None = None
    logits: Tensor | None = None
    wants_routes: bool = False
    routes: npt.NDArray[np.int16] | None = None  # of `tokens`: [T, L, experts of a token]
