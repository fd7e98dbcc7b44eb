"""Generation and grading of one group: every failure is a value, and is retried before it counts.

prompt ──> trajectories ─┬─ one request for all of them ─┐
                         └─ the user's generate, each ───┴─> reward ──> group
                    a failure: a fresh start, `max_retries` times; then the trajectory leaves the group
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rlscale.errors import EngineError
from rlscale.rollout.generate_session import GenerateSession, SessionFactory
from rlscale.rollout.grading import Scorer, grade_group
from rlscale.rollout.teacher_grading import TeacherGrading
from rlscale.rollout.timeline import SpanKind, Track, clock_s
from rlscale.trajectory import Trajectory, trajectory_from_samples
from rlscale.types import (
    Failure,
    FailureCause,
    Group,
    Prompt,
    Sample,
    SampleStatus,
    WeightVersion,
)

log = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Wait before the first retry, which doubles, and its limit."""

_UNFINISHED = (SampleStatus.pending, SampleStatus.aborted)


def _backoff_s(attempt: int) -> float:
    """The wait after a failed attempt, counted from 0."""
    # A float of 2^1024 would overflow.
    return min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(attempt, 64))


class Generate(Protocol):
    """Generates one trajectory, as `sampling.custom_generate_function_path` does.

    Returns a failure, or None. Never raises what user code raises.
    """

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """Settings of all groups of a run."""

    num_samples: int
    reward_key: str | None = None
    max_retries: int = 2  # fresh starts of a trajectory whose infrastructure failed
    max_versions: int | None = None  # of the weights of one trajectory; None: no limit
    mask_off_policy: bool = False  # tokens of earlier weights than the last of a trajectory or continued group
    round_tokens: int | None = None  # of each trajectory, after which `run` returns it unfinished; None: no limit
    generate: Generate | None = None  # by the user; None: one request
    source: str | None = None  # of the prompts, for messages; None: that of the scorer


class GroupGenerator:
    """Generates groups. Concurrent calls are independent of each other.

    Example:
        generator = GroupGenerator(sessions, rewards, GroupSettings(num_samples=4))
        group = await generator.run(7, prompt, versions=(3, 3))
    """

    def __init__(self, sessions: SessionFactory, rewards: Scorer, settings: GroupSettings) -> None:
        self._sessions, self._rewards, self._settings = sessions, rewards, settings
        self._timelines = sessions.timelines
        self.teachers: TeacherGrading | None = None  # whose logprobs samples get

    async def run(
        self,
        index: int,
        prompt: Prompt,
        *,
        versions: tuple[WeightVersion, WeightVersion | None],
        before: Group | None = None,
    ) -> Group:
        """Generates and grades a group. Its failed trajectories are in `Group.failed`.

        If requests were aborted, or a round has ended, the group has unfinished samples and no rewards.

        Args:
            versions: oldest and newest weights that engines may have.
            before: the same group with unfinished samples, to be continued.

        Raises:
            WeightSyncError: a token was made by other weights.
        """
        trajectories = self._trajectories(index, prompt, before)
        open_ones = [each for each in trajectories if each.status in _UNFINISHED]
        session = replace(self._sessions.open(index, versions), round_tokens=self._settings.round_tokens)
        try:
            await self._generate(open_ones, session)
        finally:
            self._sessions.close(index)
        group = _to_group(index, prompt, trajectories)
        if any(sample.status in _UNFINISHED for sample in group.samples):
            return group
        if self._settings.mask_off_policy:
            _mask_earlier_versions(group.samples, is_continued=before is not None)
        key, source = self._settings.reward_key, self._settings.source
        await grade_group(group, self._rewards, timelines=self._timelines, key=key, source=source)
        if self.teachers is not None:
            await self.teachers.grade(group)
        return group

    def _trajectories(self, index: int, prompt: Prompt, before: Group | None) -> list[Trajectory]:
        n, seed = self._settings.num_samples, self._sessions.group_seed(index)
        known: dict[int, list[Sample]] = {}
        for sample in [] if before is None else before.samples:
            known.setdefault(sample.index, []).append(sample)
        trajectories = []
        for j in range(n):
            fresh = Trajectory(id=index * n + j, group_index=index, prompt=prompt, seed=seed + j)
            samples = known.get(fresh.id)
            trajectory = trajectory_from_samples(samples, prompt=prompt) if samples else fresh
            limit, is_open = self._settings.max_versions, trajectory.status in _UNFINISHED
            # One more version would exceed the limit; and only a single path can be continued.
            is_full = limit is not None and len(trajectory.versions) >= limit
            if is_open and (is_full or len(samples or []) > 1):
                trajectory = fresh
            trajectories.append(trajectory)
        return trajectories

    async def _generate(self, trajectories: Sequence[Trajectory], session: GenerateSession) -> None:
        generate = self._settings.generate
        if generate is None:
            await self._generate_plain(trajectories, session)
        else:
            await asyncio.gather(*[self._generate_with(generate, each, session) for each in trajectories])

    async def _generate_plain(self, trajectories: Sequence[Trajectory], session: GenerateSession) -> None:
        """One request for all new trajectories, and one for each that is continued."""
        new = [each for each in trajectories if not each.turns]
        calls = [self._continue(each, session) for each in trajectories if each.turns]
        # Seeds count up from the first; a group that lost a trajectory to the buffer asks for each alone.
        if new and [each.seed for each in new] == list(range(new[0].seed, new[0].seed + len(new))):
            calls.append(self._generate_all(new, session))
        else:
            calls += [self._generate_all([each], session) for each in new]
        await asyncio.gather(*calls)

    async def _generate_all(self, trajectories: Sequence[Trajectory], session: GenerateSession) -> None:
        params = replace(session.params, sampling_seed=trajectories[0].seed, images=trajectories[0].prompt.images)
        if trajectories[0].seed != session.params.sampling_seed or len(trajectories) < self._settings.num_samples:
            session = replace(session, rid=f"{session.rid}-{trajectories[0].id}")
        session = replace(session, track=self._track(trajectories))

        async def request() -> None:
            answers = await session.generate_many(trajectories[0].prompt.token_ids, n=len(trajectories), params=params)
            for trajectory, answer in zip(trajectories, answers, strict=True):
                trajectory.add_generation(answer)

        await self._with_retries(trajectories, request)

    async def _continue(self, trajectory: Trajectory, session: GenerateSession) -> None:
        own = replace(session, rid=f"{session.rid}-{trajectory.id}", track=self._track([trajectory]))
        params = session.continued(trajectory.num_sampled)
        params = replace(params, sampling_seed=trajectory.seed, images=trajectory.images())

        async def request() -> None:
            trajectory.add_generation(await own.generate(trajectory.token_ids(), params))

        await self._with_retries([trajectory], request)

    async def _with_retries(self, trajectories: Sequence[Trajectory], request: Callable[[], Awaitable[None]]) -> None:
        for attempt in range(self._settings.max_retries + 1):
            try:
                await request()
            except EngineError as error:
                failure = Failure(cause=FailureCause.model_server, message=str(error))
            else:
                return
            if attempt < self._settings.max_retries:
                log.info("group %d is requested again: %s", trajectories[0].group_index, failure.message)
                self._track(trajectories).retry()
                await asyncio.sleep(_backoff_s(attempt))
        for trajectory in trajectories:
            trajectory.failure, trajectory.status = failure, SampleStatus.failed

    async def _generate_with(self, generate: Generate, trajectory: Trajectory, session: GenerateSession) -> None:
        own = replace(
            session,
            params=replace(session.params, sampling_seed=trajectory.seed, images=trajectory.prompt.images),
            rid=f"{session.rid}-{trajectory.id}",
            track=self._track([trajectory]),
        )
        for attempt in range(self._settings.max_retries + 1):
            began_s = clock_s()
            failure = await generate(trajectory, own)
            self._add_spans(trajectory, began_s)
            if failure is None or failure.cause.is_graded:
                trajectory.failure = failure
                if failure is not None and trajectory.status in _UNFINISHED:
                    trajectory.status = SampleStatus.truncated
                return
            if attempt < self._settings.max_retries:
                log.info("trajectory %d starts again: %s", trajectory.id, failure.message)
                self._track([trajectory]).retry()
                trajectory.restart()
                await asyncio.sleep(_backoff_s(attempt))
        trajectory.failure, trajectory.status = failure, SampleStatus.failed

    def _add_spans(self, trajectory: Trajectory, began_s: float) -> None:
        """Adds what a function did since `began_s`."""
        track, now_s = self._track([trajectory]), clock_s()
        # An agent asks through the gateway, in another process.
        for turn in trajectory.turns:
            if turn.interval_s is not None:
                start_s, end_s = turn.interval_s
                track.fill(SpanKind.generate, max(start_s, began_s), min(end_s, now_s))
        # Between its requests the function runs tools and its own code.
        track.fill(SpanKind.tool, began_s, now_s)

    def _track(self, trajectories: Sequence[Trajectory]) -> Track:
        return self._timelines.track([each.id for each in trajectories])


def _to_group(index: int, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Group:
    samples = [sample for trajectory in trajectories for sample in trajectory.samples()]
    failed = [sample for sample in samples if sample.status == SampleStatus.failed]
    return Group(
        index=index,
        prompt=prompt,
        samples=[sample for sample in samples if sample.status != SampleStatus.failed],
        failed=failed,
    )


def _mask_earlier_versions(samples: Sequence[Sample], *, is_continued: bool) -> None:
    """Masks tokens that older weights generated than the newest ones of the trajectory, or of a continued group.

    A continued group keeps its trajectories that were finished before: their rewards count, their tokens do not.
    """
    newest: dict[int, int] = {}
    for sample in samples:
        place = 0 if is_continued else sample.index
        newest[place] = max(newest.get(place, -1), int(sample.weight_versions.max(initial=-1)))
    for sample in samples:
        is_newest = sample.weight_versions == newest[0 if is_continued else sample.index]
        sample.loss_mask = sample.loss_mask * is_newest.astype(np.uint8)
