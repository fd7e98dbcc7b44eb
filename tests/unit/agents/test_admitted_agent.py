"""Admission of trajectories: those that run at once fit the KV cache, and those that wait are seen."""

import asyncio
from dataclasses import replace

import pytest

from rlscale.agents.admitted_agent import AdmittedAgent
from rlscale.agents.run_admission import AgentAdmission
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.timeline import MIN_GAP_S, SpanKind, Timeline, Track, clock_s
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, SampleStatus
from tests.scripted_policy import ScriptedPool, new_trajectory, open_session

PROMPT, ANSWER = 10, 90  # tokens of `new_trajectory` and of its answer


class WaitingForTools:
    """Generates trajectories that hold their cache until all that are admitted have begun."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.running, self.most, self.contexts, self._failure = 0, 0, set[int | None](), failure

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        self.contexts.add(session.params.max_context_len)
        self.running += 1
        for _ in range(20):  # others that fit begin
            await asyncio.sleep(0)
        self.most = max(self.most, self.running)
        trajectory.extend([7] * ANSWER, logprobs=[0.0] * ANSWER, weight_versions=[0] * ANSWER, sampled=True)
        self.running -= 1
        return self._failure


async def generate(agent: AdmittedAgent, number: int, session: GenerateSession) -> None:
    trajectories = [new_trajectory(number=i) for i in range(number)]
    await asyncio.gather(*[agent(each, session) for each in trajectories])


@pytest.mark.parametrize(("cache", "first", "later"), [(1000, 2, 10), (200, 1, 2), (10, 1, 1)])
async def test_as_many_run_as_fit_the_cache(cache: int, first: int, later: int) -> None:
    admission = AgentAdmission(100, cache_tokens=cache, first_tokens=500)
    inner, session = WaitingForTools(), open_session(ScriptedPool(lambda ids: ""))
    agent = AdmittedAgent(inner, admission)
    await generate(agent, first, session)
    assert inner.most == first
    # Finished ones have 100 tokens with their prompts: the next ones are expected to have as many.
    assert admission.predicted_tokens == PROMPT + ANSWER
    inner.most = 0
    await generate(agent, 30, session)
    assert inner.most == later


async def test_a_failed_attempt_predicts_nothing() -> None:
    admission = AgentAdmission(100, cache_tokens=1000, first_tokens=500)
    failure = Failure(cause=FailureCause.tool, message="no route")
    await generate(AdmittedAgent(WaitingForTools(failure), admission), 4, open_session(ScriptedPool(lambda ids: "")))
    assert admission.predicted_tokens == 500 and admission.num_running == 0


async def test_an_aborted_attempt_predicts_nothing() -> None:
    async def cut(trajectory: Trajectory, session: GenerateSession) -> None:
        trajectory.extend([7], logprobs=[0.0], weight_versions=[0], sampled=True)
        trajectory.status = SampleStatus.aborted

    admission = AgentAdmission(100, cache_tokens=1000, first_tokens=500)
    await generate(AdmittedAgent(cut, admission), 4, open_session(ScriptedPool(lambda ids: "")))
    assert admission.predicted_tokens == 500 and admission.num_running == 0


async def test_the_wait_is_in_the_timeline() -> None:
    async def until_it_counts(trajectory: Trajectory, session: GenerateSession) -> None:
        end_s = clock_s() + 2 * MIN_GAP_S
        while clock_s() < end_s:
            await asyncio.sleep(0)

    timelines = [Timeline(drawn_s=clock_s()) for _ in range(2)]
    agent = AdmittedAgent(until_it_counts, AgentAdmission(1))
    session = open_session(ScriptedPool(lambda ids: ""))
    await asyncio.gather(
        *[agent(new_trajectory(number=i), replace(session, track=Track([timelines[i]]))) for i in range(2)]
    )
    assert [[span.kind for span in each.spans] for each in timelines] == [[], [SpanKind.queue]]


async def test_the_model_limits_a_conversation() -> None:
    inner, session = WaitingForTools(), open_session(ScriptedPool(lambda ids: ""))
    agent = AdmittedAgent(inner, AgentAdmission(1), max_context_len=512)
    await generate(agent, 1, session)
    await generate(agent, 1, replace(session, params=replace(session.params, max_context_len=300)))
    assert inner.contexts == {512, 300}
