"""Admission in front of an engine whose KV cache holds fewer conversations than there are."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlscale.agents.admitted_agent import AdmittedAgent
from rlscale.agents.run_admission import AgentAdmission
from rlscale.cli import serve
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.server.generate_request import Answer, GenerateRequest
from rlscale.models.batch_shapes import cache_length, slots_of
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Failure, Prompt, SampleStatus, SamplingParams
from tests.mixed_agents import serve_logged
from tests.tiny_model import write_tiny_qwen3

CACHE_TOKENS, NUM_AGENTS, NUM_TURNS = 512, 16, 3
PROMPT, ANSWER, GIVEN = list(range(5, 25)), 25, [7] * 5
LENGTH = len(PROMPT) + NUM_TURNS * ANSWER + (NUM_TURNS - 1) * len(GIVEN)
FITTING = slots_of(cache_length(LENGTH), num_slots=64, max_cached_tokens=CACHE_TOKENS)


@dataclass
class Requests:
    """Requests that the engine has at the same time."""

    open: int = 0
    most: int = 0
    most_waiting: int = 0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[EngineAddress, Requests]]:
    model, requests = write_tiny_qwen3(tmp_path), Requests()
    arguments = [f"--model-path={model}", "--num-threads=1", f"--max-cached-tokens={CACHE_TOKENS}"]
    service, scheduler, _ = serve.build(serve.make_parser().parse_args(arguments))
    generate = service.generate

    async def counted(request: GenerateRequest) -> list[Answer]:
        requests.most_waiting = max(requests.most_waiting, service.load().waiting)
        requests.open += 1
        requests.most = max(requests.most, requests.open)
        try:
            return await generate(request)
        finally:
            requests.open -= 1

    service.generate = counted  # type: ignore[method-assign]
    scheduler.start()
    try:
        with serve_logged(service) as log:
            yield log.address, requests
    finally:
        scheduler.close()


async def talk(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
    """Answers of a fixed length with something given between them."""
    for turn in range(NUM_TURNS):
        # The engine reserves its cache for the prompt and all tokens that an answer may have.
        left = LENGTH - len(trajectory.token_ids())
        answer = await session.generate(trajectory.token_ids(), replace(session.params, max_new_tokens=left))
        cut = {name: getattr(answer, name)[:ANSWER] for name in ("output_ids", "logprobs", "weight_versions")}
        trajectory.add_generation(replace(answer, **cut))
        if turn + 1 < NUM_TURNS:
            trajectory.extend(GIVEN)
    trajectory.status = SampleStatus.completed
    return None


@pytest.mark.parametrize("has_admission", [False, True])
async def test_no_request_waits_in_the_engine_with_admission(
    engine: tuple[EngineAddress, Requests], has_admission: bool
) -> None:
    address, requests = engine
    assert FITTING == 4
    options: dict[str, Any] = {"cache_tokens": CACHE_TOKENS, "first_tokens": LENGTH} if has_admission else {}
    admission = AgentAdmission(100, **options)
    agent, pool = AdmittedAgent(talk, admission), EnginePool([HttpEngine(address, timeout_s=300)])
    params = SamplingParams(max_new_tokens=100, sampling_seed=1, ignore_eos=True)
    prompt = Prompt(index=0, text="", token_ids=tuple(PROMPT))
    trajectories = [Trajectory(id=i, group_index=i, prompt=prompt, seed=i) for i in range(NUM_AGENTS)]

    async def run(trajectory: Trajectory) -> None:
        session = GenerateSession(params=params, rid=f"train-{trajectory.id}", pool=pool, versions=(0, 0))
        assert await agent(trajectory, session) is None

    await asyncio.gather(*map(run, trajectories))
    await pool.close()
    assert {len(each.token_ids()) for each in trajectories} == {LENGTH}
    if has_admission:
        assert requests.most == FITTING and admission.predicted_tokens == LENGTH
    else:
        assert requests.most == NUM_AGENTS and requests.most_waiting >= NUM_AGENTS - FITTING - 1
