"""Requests that are not answered completely yet."""

import math
from collections.abc import Callable

from rlscale.engines.embedded.inbox import FAILED_STATUS
from rlscale.engines.embedded.requests import Request, Sequence
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.engines.server.generate_request import Refused

ABORTED: dict[str, object] = {"type": "abort", "message": "Aborted"}


class OpenRequests:
    """Extends, finishes and fails sequences, and resolves the future of a request with its last one.

    Decode thread only, except `num_open`.

    Args:
        on_finish: frees the slot of a sequence.
        on_fail: removes failed sequences from the queue.
    """

    def __init__(
        self, weights: WeightStore, *, on_finish: Callable[[Sequence], None], on_fail: Callable[[], None]
    ) -> None:
        self._weights, self._on_finish, self._on_fail = weights, on_finish, on_fail
        self._by_rid: dict[str, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    @property
    def num_open(self) -> int:
        """Sequences without an end. May be read from any thread."""
        return sum(request.num_open for request in list(self._by_rid.values()))

    def add(self, request: Request) -> None:
        self._by_rid[request.spec.rid] = request

    def abort(self, rid: str | None, *, adapter: str | None = None) -> None:
        """Finishes requests with the tokens they have: `rid` and those whose id begins with it, as SGLang does, or all.

        An id that is not open aborts nothing. With `adapter` only requests of versions of that name are finished.
        """
        names = list(self._by_rid) if rid is None else [each for each in self._by_rid if each.startswith(rid)]
        requests = [self._by_rid[name] for name in names if rid is None or rid in self._by_rid]
        if adapter is not None:
            requests = [each for each in requests if each.adapter is not None and each.adapter.name == adapter]
        # `requests` is a copy: finishing the last sequence removes its request.
        for request in requests:
            for sequence in request.sequences:
                if sequence.finish is None:
                    self.finish(sequence, dict(ABORTED))

    def extend(self, sequence: Sequence, token: int, logprob: float) -> bool:
        """Appends a token and returns whether the sequence continues."""
        if sequence.finish is not None:
            return False  # its request failed earlier in this step
        if not math.isfinite(logprob):
            error = f"logprobs must be finite, got {logprob}; the model's weights diverged"
            self.fail(sequence.request, Refused(error, status=FAILED_STATUS))
            return False
        version = sequence.request.version(self._weights.version)
        sequence.append(token, logprob, version)
        finish = sequence.request.finish_of(sequence)
        if finish is None:
            sequence.request.notify(sequence, version)
        else:
            self.finish(sequence, finish)
        return finish is None

    def finish(self, sequence: Sequence, reason: dict[str, object]) -> None:
        sequence.finish = reason
        request = sequence.request
        self._on_finish(sequence)
        version = request.version(self._weights.version)
        request.notify(sequence, version)
        request.num_open -= 1
        if request.num_open == 0:
            self._by_rid.pop(request.spec.rid, None)
            request.future.set_result(request.answers(version))

    def fail(self, request: Request, error: Refused) -> None:
        """Ends all sequences of `request` and raises `error` to its caller."""
        self._by_rid.pop(request.spec.rid, None)
        for sequence in request.sequences:
            if sequence.finish is None:
                sequence.finish = {"type": "abort", "message": str(error)}
                self._on_finish(sequence)
        request.num_open = 0
        self._on_fail()
        if not request.future.done():
            request.future.set_exception(error)

    def fail_all(self, error: Refused) -> None:
        for request in list(self._by_rid.values()):
            self.fail(request, error)
