"""Requests of a user's generate function: a trajectory has one budget of tokens, however many turns it takes."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.user_generate import ThreadSession, UserGenerate
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, Prompt, SampleStatus, SamplingParams

LIMIT = 10


class LongAnswers:
    """A pool that answers each request with as many tokens as it allows, at most 4."""

    def __init__(self, models: Any = None) -> None:
        self.models = models
        self.limits: list[tuple[int, int]] = []

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, n: int, **options: Any
    ) -> list[Generation]:
        self.limits.append((params.min_new_tokens, params.max_new_tokens))
        length = min(4, params.max_new_tokens)
        end = "length" if length == params.max_new_tokens else "stop"
        return [
            Generation(
                output_ids=[7] * length,
                logprobs=[-1.0] * length,
                weight_versions=[1] * length,
                finish_reason=end,
                text="7" * length,
                engine="a",
            )
        ] * n


def open_session(pool: LongAnswers) -> GenerateSession:
    params = SamplingParams(max_new_tokens=LIMIT, min_new_tokens=3)
    return GenerateSession(params=params, rid="train-0", pool=cast(EnginePool, pool), versions=(1, 1))


def new_trajectory() -> Trajectory:
    return Trajectory(id=0, group_index=0, prompt=Prompt(index=0, text="a", token_ids=(1,)), seed=0)


async def until_length(trajectory: Trajectory, session: Any) -> None:
    while trajectory.status != SampleStatus.truncated:
        trajectory.add_generation(await session.generate(trajectory.token_ids()))
        if trajectory.status == SampleStatus.completed:
            trajectory.extend([99] * 5)  # the output of a tool does not count


@pytest.mark.parametrize(("num_before", "limits"), [(0, [(3, 10), (3, 6), (2, 2)]), (7, [(3, 3)]), (10, [])])
async def test_all_turns_share_the_tokens_of_a_trajectory(num_before: int, limits: list[tuple[int, int]]) -> None:
    pool = LongAnswers()
    trajectory = new_trajectory()
    if num_before:
        trajectory.extend(
            [7] * num_before, logprobs=[-1.0] * num_before, weight_versions=[0] * num_before, sampled=True
        )
    assert await UserGenerate(until_length, timeout_s=30.0)(trajectory, open_session(pool)) is None
    assert pool.limits == limits
    assert trajectory.num_sampled == LIMIT
    assert trajectory.status == SampleStatus.truncated


@pytest.mark.parametrize(("num_before", "lengths"), [(0, [3, 3, 0]), (1, [3, 0, 0]), (2, [0, 0, 0])])
async def test_all_calls_of_a_trajectory_share_its_turns(num_before: int, lengths: list[int]) -> None:
    trajectory = new_trajectory()
    for _ in range(num_before):
        trajectory.extend([7], logprobs=[-1.0], weight_versions=[0], sampled=True)
    pool = LongAnswers()
    session = ThreadSession(open_session(pool), asyncio.get_running_loop(), trajectory=trajectory, max_turns=2)
    short = SamplingParams(max_new_tokens=3)
    assert [len((await session.generate([1], short)).output_ids) for _ in range(3)] == lengths
    # A turn that was aborted is continued, and not counted twice.
    trajectory.status = SampleStatus.aborted
    session = ThreadSession(open_session(pool), asyncio.get_running_loop(), trajectory=trajectory, max_turns=2)
    assert len((await session.generate([1], short)).output_ids) == 3


async def test_a_request_may_ask_for_less() -> None:
    pool = LongAnswers()
    session = ThreadSession(open_session(pool), asyncio.get_running_loop(), trajectory=new_trajectory())
    short = SamplingParams(max_new_tokens=2)
    assert [len((await session.generate([1], short)).output_ids) for _ in range(6)] == [2, 2, 2, 2, 2, 0]


async def test_requests_of_several_trajectories_have_no_common_limit() -> None:
    pool = LongAnswers()
    session = ThreadSession(open_session(pool), asyncio.get_running_loop())
    answers = await asyncio.gather(*[session.generate([1]) for _ in range(6)])
    assert [len(answer.output_ids) for answer in answers] == [4] * 6


async def test_a_generate_function_asks_a_frozen_model_by_its_name() -> None:
    class Models:
        """A client whose model answers with its name, in the event loop of the run."""

        def model(self, name: str) -> Any:
            self.name = name
            return self

        async def generate(self, prompt: str, **params: Any) -> str:
            assert asyncio.get_running_loop() is loop, "its connections belong to the run"
            return f"{self.name}: {prompt} {params}"

    async def ask(trajectory: Trajectory, session: Any) -> None:
        trajectory.metadata["opinion"] = await session.model("ref").generate("a", max_new_tokens=3)
        trajectory.add_generation(await session.generate(trajectory.token_ids()))

    loop, pool = asyncio.get_running_loop(), LongAnswers(models=Models())
    trajectory = new_trajectory()
    assert await UserGenerate(ask, timeout_s=30.0)(trajectory, open_session(pool)) is None
    assert trajectory.metadata == {"opinion": "ref: a {'max_new_tokens': 3}"}
    pool.models = None
    failure = await UserGenerate(ask, timeout_s=30.0)(trajectory, open_session(pool))
    assert failure is not None and "must name a frozen model of sglang.config (none), got ref" in failure.message
