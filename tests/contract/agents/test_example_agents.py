"""The agents of the examples behind the real gateway: every token is the engine's, and the trees are right."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rlscale.agents.agent_runner import Agent, AgentLimits, AgentRunner
from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_function import FunctionAgent
from rlscale.agents.run_log import AgentLogs
from rlscale.data.data_paths import resolve_data_path
from rlscale.examples import two_agents
from rlscale.gateway.gateway_client import GatewayClient
from rlscale.gateway.gateway_process import GatewayProcess
from rlscale.plugins.load_plugin import load_plugin
from rlscale.rewards.builtin import exact_match
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt, SampleStatus
from tests.contract.agents.conftest import CurrentScript
from tests.contract.agents.test_frameworks import conversations
from tests.gateway_fixtures import LoggedFake, sampled_pairs
from tests.scripted_engine import build_codec

FIRST, SECOND = "<|call|>calculate 12*34", "<|call|>calculate 408+5"

Generate = Callable[[Agent, str, str], Awaitable[Trajectory]]


@pytest.fixture
async def generate(
    gateway: GatewayProcess, engine: LoggedFake, session: GenerateSession, tmp_path: Path
) -> AsyncIterator[Generate]:
    """Runs an agent on one question; checks that it ends well, with the tokens of the engine."""
    client = GatewayClient(gateway.address)
    engine.entries.clear()

    async def run(agent: Agent, question: str, label: str) -> Trajectory:
        messages = ({"role": "user", "content": question},)
        ids = build_codec().renderer.render(messages)
        prompt = Prompt(index=0, text="", token_ids=tuple(ids), label=label, messages=messages)
        trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=5)
        logs = AgentLogs(tmp_path, keep=10, max_bytes=100_000)
        limits = AgentLimits(timeout_s=120.0, max_turns=4)
        runner = AgentRunner(client, agent, limits, logs=logs, admission=AgentAdmission(4))
        failure = await runner(trajectory, session)
        assert failure is None, (tmp_path / "0" / "0.log").read_text()
        assert trajectory.status == SampleStatus.completed
        assert sampled_pairs(trajectory) == engine.pairs()
        return trajectory

    yield run
    await client.close()


async def test_two_agents_are_two_paths_of_which_the_listeners_is_graded(
    current: CurrentScript, generate: Generate
) -> None:
    row = json.loads(resolve_data_path("builtin:two_agents/heldout.jsonl").read_text().splitlines()[0])
    current.script = lambda text: row["label"] if "Which number?" in text else "The code is e, h, c."
    trajectory = await generate(FunctionAgent(two_agents.play), row["prompt"][0]["content"], row["label"])
    assert conversations(trajectory) == [["The code is e, h, c."], [row["label"]]]
    speaker, listener = trajectory.samples()
    assert exact_match(listener) == 1.0 and exact_match(speaker) == 0.0
    assert speaker.prompt.token_ids != listener.prompt.token_ids
    assert all(sample.loss_mask.all() and sample.metadata["letters"] == "the" for sample in (speaker, listener))


def calculates(text: str) -> str:
    """Two calls, which need the result of the one before, then the answer."""
    return FIRST if "<|tool|>" not in text else SECOND if "<|tool|>413" not in text else "413"


def agent_in_process() -> Agent:
    # Imported as in a run: the framework takes seconds.
    function = load_plugin("agent.function_path", "rlscale.examples.framework_agent:run", args=None, custom={})
    return FunctionAgent(function)


def agent_by_command() -> Agent:
    return CommandAgent(command=["python", "-m", "rlscale.examples.calculator_agent", "{task_file}"])


@pytest.mark.parametrize("build", [agent_in_process, agent_by_command])
async def test_the_unchanged_agent_calls_its_tool(
    current: CurrentScript, generate: Generate, engine: LoggedFake, build: Callable[[], Agent]
) -> None:
    current.script = calculates
    trajectory = await generate(build(), "12*34+5", "413")
    assert conversations(trajectory) == [[FIRST, SECOND, "413"]]
    assert trajectory.reward is None and trajectory.samples()[0].answer == "413"
    # The prompt is that of the warm-up, whose demonstrations are those of experiment=calculator.
    demo = json.loads(resolve_data_path("builtin:calculator/demos.jsonl").read_text().splitlines()[0])
    question = [{"role": "user", "content": "12*34+5"}]
    assert engine.entries[0].input_ids == tuple(build_codec().renderer.render(question, tools=demo["tools"]))
