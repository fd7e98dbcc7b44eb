"""The keys of `agent` for agents that know a URL."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_function import FunctionAgent
from rlscale.agents.run_remote import RemoteAgent
from rlscale.agents.run_task import AgentSession
from rlscale.config import RunConfig, load_config
from rlscale.driver.open_agent_runner import build_agent, open_agent_runner
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import EngineError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt, SamplingParams
from tests.agent_gateway import FakeGateway

SESSION = AgentSession(base_url="http://127.0.0.1:1/v1", anthropic_url="http://127.0.0.1:1", api_key="key")


def config(*overrides: str) -> RunConfig:
    return load_config(["experiment=quickstart", *overrides])


def test_a_key_chooses_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSCALE_AGENT_API_KEY", "secret")
    assert isinstance(build_agent(config("agent.url=http://127.0.0.1:9/run")), RemoteAgent)
    assert isinstance(build_agent(config("agent.function_path=operator:add")), FunctionAgent)
    command = build_agent(
        config("agent.command=[my-agent]", "agent.env={A: b}", "agent.pass_env=[A_KEY]", "agent.policy_errors=[Lost]")
    )
    assert command == CommandAgent(
        command=["my-agent"], env={"A": "b"}, pass_env=["A_KEY"], policy_errors=("Lost",), has_own_folder=True
    )
    process = build_agent(config("agent.function_path=operator:add", "agent.isolation=process", "++custom.depth=3"))
    assert isinstance(process, CommandAgent) and not process.has_own_folder
    assert process.env == {"RLSCALE_CUSTOM": '{"depth": 3}'} and "'operator:add'" in process.command[-1]


class Engines:
    """A pool that only describes its engines."""

    def __init__(self, *infos: dict[str, Any] | None) -> None:
        self.present = [SimpleNamespace(info=lambda info=info: self._info(info)) for info in infos]

    async def _info(self, info: dict[str, Any] | None) -> dict[str, Any]:
        if info is None:
            raise EngineError("engine 0 cannot be reached")
        return info


@pytest.mark.parametrize(
    ("overrides", "infos", "most"),
    [
        (["agent.max_concurrent=3"], [{}], 3),
        (["rollout.num_slots=2"], [{}, {}], 4),
        (["rollout.num_slots=2"], [None], 2),
        # A cache of 30 tokens: each conversation is expected to have 6, the most that a trajectory may generate.
        (["rollout.num_slots=16"], [{"max_total_num_tokens": 20}, {"max_total_num_tokens": 10}], 5),
    ],
)
async def test_as_many_agents_run_as_engines_and_their_cache_hold(
    tmp_path: Path, overrides: list[str], infos: list[dict[str, Any] | None], most: int
) -> None:
    running, counts, released = 0, [0], asyncio.Event()

    async def agent(task: Any, session: Any) -> float:
        nonlocal running
        running += 1
        counts.append(running)
        await asyncio.to_thread(wait, released)
        running -= 1
        return 1.0

    def wait(event: asyncio.Event) -> None:
        asyncio.run_coroutine_threadsafe(event.wait(), loop).result()

    loop, gateway = asyncio.get_running_loop(), FakeGateway()
    prepared = SimpleNamespace(config=config("agent.function_path=operator:add", *overrides), model_path=str(tmp_path))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    pool = cast(EnginePool, Engines(*infos))
    session = GenerateSession(params=SamplingParams(max_new_tokens=6), rid="train-0", pool=pool, versions=(0, 0))
    async with open_agent_runner(cast(PreparedRun, prepared), pool, gateway, folder=tmp_path) as runner:
        runner._agent = FunctionAgent(agent)
        prompt = Prompt(index=0, text="", token_ids=(1,))
        calls = [runner(Trajectory(id=i, group_index=0, prompt=prompt, seed=0), session) for i in range(8)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while max(counts) < most:
            await asyncio.sleep(0.01)
        assert len(gateway.open) == most, "a session is opened only for an agent that may run"
        # Before the first end: conversations that were shorter than expected make room for more.
        assert max(counts) == most
        released.set()
        await asyncio.gather(*tasks)
    assert {path.name for path in (tmp_path / "agents" / "0").iterdir()} == {f"{i}.log" for i in range(8)}
    assert gateway.ended[0].params.max_context_len == 64
