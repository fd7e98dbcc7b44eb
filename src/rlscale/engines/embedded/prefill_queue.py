"""Prompts that wait for slots, in order of arrival."""

from collections import deque
from collections.abc import Callable, Iterable

from rlscale.engines.embedded.requests import PrefillJob, Request, Sequence
from rlscale.models.batch_shapes import cache_length

Admission = tuple[int, PrefillJob, list[Sequence]]
"""A cache length, a job, and those of its sequences that get a slot now."""


class PrefillQueue:
    """One queue of jobs for each cache length, so that a full decode batch does not block the others."""

    def __init__(self) -> None:
        self._jobs: dict[int, deque[PrefillJob]] = {}

    @property
    def is_empty(self) -> bool:
        return not any(self._jobs.values())

    def add(
        self, tokens: tuple[int, ...], sequences: Iterable[Sequence], request: Request, *, first: bool = False
    ) -> None:
        """Appends `tokens`, to be computed once for all `sequences`; `first`: before all others."""
        job = PrefillJob(
            tokens=tokens,
            sequences=deque(sequences),
            adapter=request.adapter,
            images=request.spec.images,
            wants_routes=request.spec.return_routes,
        )
        jobs = self._jobs.setdefault(cache_length(request.total_len), deque())
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)

    def pop(self, num_free: Callable[[int], int]) -> list[Admission]:
        """Removes as many sequences as there are free slots, in order. `num_free` takes a cache length."""
        admitted: list[Admission] = []
        for length, jobs in self._jobs.items():
            free = num_free(length) if jobs else 0
            while jobs and free:
                job = jobs[0]
                sequences = [job.sequences.popleft() for _ in range(min(free, len(job.sequences)))]
                free -= len(sequences)
                admitted.append((length, job, sequences))
                if job.sequences:
                    break
                jobs.popleft()
        return admitted

    def drop_finished(self) -> None:
        """Removes sequences that were aborted or failed, and jobs without sequences."""
        for length, jobs in self._jobs.items():
            for job in jobs:
                job.sequences = deque(s for s in job.sequences if s.finish is None)
            self._jobs[length] = deque(job for job in jobs if job.sequences)

    def forget_prefills(self) -> None:
        """Discards computed prompts: the weights that computed them are about to change."""
        for jobs in self._jobs.values():
            for job in jobs:
                job.cache = job.logits = None
