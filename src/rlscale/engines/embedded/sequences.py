"""What the decode thread knows of requests: tickets, their sequences, and prompts waiting for slots."""

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from rlscale.engines.wire import Answer, GenerateRequest, VersionSpan


@dataclass(eq=False, slots=True)
class Sequence:
    """One of the `n` answers of a request, growing. `spans` are [version, start, end)."""

    ticket: "Ticket"
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    num_retractions: int = 0
    finish: dict[str, object] | None = None

    def append(self, token: int, logprob: float, version: str) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        end = len(self.ids)
        start = end - 1
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))


@dataclass(eq=False, slots=True)
class Ticket:
    """A request under way. `future` gets its answers, in order, once all are finished; or the error."""

    request: GenerateRequest
    stop_ids: frozenset[int]
    future: "Future[list[Answer]]"
    sequences: list[Sequence] = field(default_factory=list)
    num_open: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def total_len(self) -> int:
        """Most tokens that a sequence of this request can have, prompt included."""
        return len(self.request.input_ids) + self.request.params.max_new_tokens

    def finish_of(self, sequence: Sequence) -> dict[str, object] | None:
        """Why `sequence` ends with its last token, or None when it goes on."""
        if sequence.ids[-1] in self.stop_ids:
            return {"type": "stop", "matched": sequence.ids[-1]}
        if len(sequence.ids) >= self.request.params.max_new_tokens:
            return {"type": "length", "length": len(sequence.ids)}
        return None

    def answers(self, version: str) -> list[Answer]:
        seconds = time.monotonic() - self.started_s
        return [
            Answer(
                output_ids=s.ids,
                logprobs=s.logprobs,
                spans=s.spans,
                finish_reason=s.finish or {},
                weight_version=s.spans[-1].version if s.spans else version,
                num_retractions=s.num_retractions,
                seconds=seconds,
            )
            for s in self.sequences
        ]


@dataclass(eq=False, slots=True)
class Job:
    """Tokens to be prefilled once, and the sequences that go on from them.

    `cache` [L, 2, K, T, D] and `logits` [V] are there once it is prefilled, until its last sequence has a slot.
    """

    tokens: tuple[int, ...]
    sequences: deque[Sequence]
    cache: Tensor | None = None
    logits: Tensor | None = None
