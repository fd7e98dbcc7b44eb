"""Logprobs of the teachers for the samples of a finished group: failures are values, as those of engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from rlscale.errors import EngineError
from rlscale.protocols import Teacher
from rlscale.teacher_scores import TeacherScores
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus

log = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Wait before the first retry, which doubles, and its limit."""

MAX_IN_FLIGHT = 64
"""Requests of a run to its teachers that are open at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherChoice:
    """The teachers of a run: one for all rows, or by the data source of a row."""

    default: Teacher | None = None  # None: rows of other sources have none, which is a failure
    by_source: Mapping[str, Teacher]  # name of a data source, or a pattern
    source_key: str = "data_source"  # entry of the metadata with the name of the source

    def find(self, prompt: Prompt) -> Teacher | None:
        """The teacher of a row: that of its source, of the first pattern, else the default."""
        source = str(prompt.metadata.get(self.source_key, ""))
        if source in self.by_source:
            return self.by_source[source]
        pattern = next((each for each in self.by_source if fnmatchcase(source, each)), None)
        return self.default if pattern is None else self.by_source[pattern]


class TeacherGrading:
    """Asks the teachers for the logprobs of every trainable token of a group.

    Args:
        max_retries: further requests after a failure; then the trajectory leaves the group.
        backoff_s: wait before the first retry, which doubles.
    """

    def __init__(self, choice: TeacherChoice, *, max_retries: int, backoff_s: float = BACKOFF_S) -> None:
        self._choice, self._max_retries, self._backoff_s = choice, max_retries, backoff_s
        self._limit = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def grade(self, group: Group) -> None:
        """Sets `Sample.teacher` of all samples. A trajectory whose teacher failed moves to `Group.failed`."""
        found = await asyncio.gather(*[self._score(sample) for sample in group.samples])
        failures = {
            sample.index: result
            for sample, result in zip(group.samples, found, strict=True)
            if isinstance(result, Failure)
        }
        for sample, result in zip(group.samples, found, strict=True):
            failure = failures.get(sample.index)
            if failure is not None:
                # All samples of the trajectory: a part of it would change its share of the loss.
                sample.failure, sample.status, sample.reward = failure, SampleStatus.failed, None
                group.failed.append(sample)
            elif isinstance(result, TeacherScores):
                sample.teacher = result
        group.samples = [sample for sample in group.samples if sample.status != SampleStatus.failed]

    async def _score(self, sample: Sample) -> TeacherScores | Failure:
        teacher = self._choice.find(sample.prompt)
        if teacher is None:
            source = sample.prompt.metadata.get(self._choice.source_key)
            message = f"row {sample.prompt.index} must have a source in data.teacher_by_source, got {source!r}"
            return Failure(cause=FailureCause.controller, message=message)
        for attempt in range(self._max_retries + 1):
            try:
                async with self._limit:
                    return await _score_response(teacher, sample)
            except EngineError as error:
                failure = Failure(cause=FailureCause.model_server, message=f"the teacher failed: {error}")
                if error.is_refusal:  # the same request would be refused again
                    break
            if attempt < self._max_retries:
                log.info("retrying the teacher's score of sample %d: %s", sample.index, failure.message)
                await asyncio.sleep(min(MAX_BACKOFF_S, self._backoff_s * 2.0 ** min(attempt, 64)))
        return failure


async def _score_response(teacher: Teacher, sample: Sample) -> TeacherScores:
    """Logprobs of the response [R], requested from its first trainable token on."""
    trainable = np.flatnonzero(sample.loss_mask)
    # Without a trainable token one place is requested all the same, so that all samples have the same columns.
    skipped = int(trainable[0]) if len(trainable) else sample.response_len - 1
    num_extra = max(0, -skipped)  # 1 for an empty response: the place is the last token of the prompt
    scores = await teacher.score(sample.tokens.tolist(), start=sample.prompt_len + skipped, images=sample.images)

    def pad(column: Any) -> Any:
        # Places before the first trainable token are in no loss.
        if column is None:
            return None
        return np.concatenate([np.zeros((max(0, skipped), *column.shape[1:]), column.dtype), column[num_extra:]])

    logprobs = pad(scores.logprobs)
    assert len(logprobs) == sample.response_len, "one logprob for each token"
    return replace(scores, logprobs=logprobs, top_ids=pad(scores.top_ids), top_logprobs=pad(scores.top_logprobs))
