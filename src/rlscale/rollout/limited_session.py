"""Requests of one trajectory of user code, whose turns share the limits of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlscale.rollout.generate_session import FULL, GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, SampleStatus, SamplingParams


class LimitedSession:
    """A `GenerateSession` with limits of tokens and of turns. Used from the event loop of the run.

    Args:
        trajectory: whose turns so far count; all turns together get at most the `max_new_tokens` of `params`. None: the
            requests are of several trajectories, and each has this limit.
        max_turns: answers of engines; None: no limit.
    """

    def __init__(
        self, session: GenerateSession, trajectory: Trajectory | None, *, max_turns: int | None = None
    ) -> None:
        self.session, self._num_requests = session, 0
        self._num_sampled = None if trajectory is None else trajectory.num_sampled
        self._turns_left = None if max_turns is None else max_turns - _num_ended(trajectory)

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """See GenerateSession. The answer is empty, with the finish reason `length`, if a limit is reached."""
        self._num_requests += 1
        # Open requests of an engine have different names.
        own, given = (
            replace(self.session, rid=f"{self.session.rid}-{self._num_requests}"),
            params or self.session.params,
        )
        if self._turns_left is not None:
            if self._turns_left <= 0:
                return FULL
            self._turns_left -= 1
        if self._num_sampled is not None:
            left = self.session.params.max_new_tokens - self._num_sampled
            if left <= 0:
                return FULL
            longest = min(given.max_new_tokens, left)
            given = replace(given, max_new_tokens=longest, min_new_tokens=min(given.min_new_tokens, longest))
        answer = await own.generate(token_ids, given)
        if self._num_sampled is not None:
            self._num_sampled += len(answer.output_ids)
        return answer

    def restart(self, trajectory: Trajectory, *, max_turns: int | None) -> LimitedSession:
        """The limits of the same call, which starts again; its requests have other names than those before."""
        fresh = LimitedSession(self.session, trajectory, max_turns=max_turns)
        fresh._num_requests = self._num_requests
        return fresh


def _num_ended(trajectory: Trajectory | None) -> int:
    """Turns of the policy that will not be continued."""
    if trajectory is None:
        return 0
    number = sum(turn.sampled for turn in trajectory.turns)
    is_open = trajectory.status == SampleStatus.aborted and bool(trajectory.turns) and trajectory.turns[-1].sampled
    return number - is_open
