"""Share of failed trajectories over the last rollouts; a run whose infrastructure is broken stops."""

import logging
from collections import Counter, deque

from rlscale.errors import FailureShareError
from rlscale.types import Failure, FailureCause, Group

_logger = logging.getLogger(__name__)

WINDOW = 3
"""Rollouts over which the share is measured: the current one and those before it."""


class FailureWatch:
    """Counts trajectories and their failures.

    Args:
        max_share: above it a run stops.
        least: trajectories of a rollout; the share is of at least as many, so that the first failure stops nothing.
        where: what failed, for messages.
    """

    def __init__(self, *, max_share: float, least: int, where: str = "the last rollouts") -> None:
        self._max_share, self._least, self._where = max_share, least, where
        self._totals: deque[int] = deque([0], maxlen=WINDOW)
        self._causes: deque[Counter[str]] = deque([Counter()], maxlen=WINDOW)
        self._latest: dict[str, Failure] = {}

    def end_rollout(self) -> None:
        """Begins the counts of the next rollout."""
        self._totals.append(0)
        self._causes.append(Counter())

    def add(self, group: Group) -> None:
        """Counts a finished group.

        Raises:
            FailureShareError: too many of the last trajectories failed; the message has the commonest cause.
        """
        failed = {sample.index: sample.failure for sample in group.failed if sample.failure is not None}
        self._totals[-1] += len(failed) + len({sample.index for sample in group.samples})
        for failure in failed.values():
            self._causes[-1][failure.cause] += 1
            # The runner of rewards reports those of graders.
            if failure.cause not in self._latest and failure.cause is not FailureCause.grader:
                _logger.warning("%s; further failures by cause %s are only counted", failure.message, failure.cause)
            self._latest[failure.cause] = failure
        causes: Counter[str] = sum(self._causes, Counter())
        num_failed, total = sum(causes.values()), max(sum(self._totals), self._least)
        if num_failed <= self._max_share * total:
            return
        cause, number = causes.most_common(1)[0]
        raise FailureShareError(
            f"sampling.max_failed_share={self._max_share:g}: {num_failed} of {total} trajectories of "
            f"{self._where} failed, {number} by cause {cause}; the last one: {self._latest[cause].message}"
        )
