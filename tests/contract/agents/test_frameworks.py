"""Unchanged agents of three frameworks behind the real gateway: every token is the engine's, the trees are right."""

import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from rlscale.agents.agent_runner import AgentLimits, AgentRunner
from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_log import AgentLogs
from rlscale.config.groups.agent import POLICY_ERRORS
from rlscale.gateway.gateway_client import GatewayClient
from rlscale.gateway.gateway_process import GatewayProcess
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt, SampleStatus
from tests.contract.agents.conftest import CurrentScript
from tests.gateway_fixtures import LoggedFake, sampled_pairs
from tests.scripted_engine import build_codec

PROGRAMS = Path(__file__).parents[2] / "framework_agents"
FRAMEWORKS = ["openai_agents", "pydantic_ai", "smolagents"]


@pytest.fixture
def trajectory() -> Trajectory:
    messages = ({"role": "user", "content": "2+2="},)
    ids = build_codec().renderer.render(messages)
    prompt = Prompt(index=0, text="", token_ids=tuple(ids), label="4", messages=messages)
    return Trajectory(id=0, group_index=0, prompt=prompt, seed=5)


@pytest.fixture
async def runner(
    gateway: GatewayProcess, engine: LoggedFake, tmp_path: Path
) -> AsyncIterator[Callable[..., AgentRunner]]:
    client = GatewayClient(gateway.address)
    engine.entries.clear()

    def build(framework: str, *, max_turns: int = 20) -> AgentRunner:
        return AgentRunner(
            client,
            CommandAgent(command=[sys.executable, str(PROGRAMS / f"{framework}_program.py")]),
            AgentLimits(timeout_s=120.0, max_turns=max_turns),
            logs=AgentLogs(tmp_path, keep=10, max_bytes=100_000),
            admission=AgentAdmission(4),
        )

    yield build
    await client.close()


def log_text(tmp_path: Path) -> str:
    return (tmp_path / "0" / "0.log").read_text()


def conversations(trajectory: Trajectory) -> list[list[str]]:
    """The sampled answers in each path, in the order of the paths."""
    decode, parents = build_codec().decode, {turn.parent for turn in trajectory.turns}
    assert decode is not None
    found = []
    for leaf in range(len(trajectory.turns)):
        if leaf not in parents:
            found.append(list[str]())
            number: int | None = leaf
            while number is not None:
                turn = trajectory.turns[number]
                if turn.sampled:
                    found[-1].insert(0, decode(turn.token_ids.tolist()).removesuffix("<|eos|>"))
                number = turn.parent
    return found


def last_message(text: str) -> str:
    """Role and text of the last message of a request."""
    return text.removesuffix("<|assistant|>").rpartition("<|")[2]


def adds(text: str) -> str:
    return "4" if last_message(text) == "tool|>4" else "<|call|>add 2 2"


def hands_off(text: str) -> str:
    return "<|call|>transfer_to_adder" if "Hand off." in text else adds(text)


def asks_helper(text: str) -> str:
    if "Help." in text:
        return "say 4"
    return "4" if last_message(text) == "tool|>say 4" else "<|call|>ask what?"


def adds_four_times(text: str) -> str:
    """Calls with 1, 2, 3 and 4; the last result is an answer. A compacted request has the newest call only."""
    known = [int(each) for each in re.findall(r"add (\d) 2<\|eos\|>", text)]
    return f"<|call|>add {max(known, default=0) + 1} 2" if max(known, default=0) < 4 else "4"


def adds_as_text(text: str) -> str:
    return "<|call|>final_answer 4" if "Observation:" in text.rpartition("New task")[2] else "<|call|>add 2 2"


ADD, HAND_OFF, FINAL = "<|call|>add 2 2", "<|call|>transfer_to_adder", "<|call|>final_answer 4"
ADDS = ["<|call|>add 1 2", "<|call|>add 2 2", "<|call|>add 3 2", "<|call|>add 4 2"]
CASES = {
    # The second agent has other instructions and tools.
    "openai_agents-handoff": (hands_off, [[HAND_OFF], [ADD, "4"]]),
    # The answer of the whole agent is the newest one, so that its path is the last: it is the graded one.
    "openai_agents-agent_as_tool": (asks_helper, [["say 4"], ["<|call|>ask what?", "4"]]),
    "pydantic_ai-tool": (adds, [[ADD, "4"]]),
    # From the sixth message on, a request has the first message and the last two; then it grows again.
    "pydantic_ai-compaction": (adds_four_times, [ADDS[:3], [ADDS[3], "4"]]),
    # It writes earlier calls as text, which are other tokens than those that were sampled.
    "smolagents-tool": (adds_as_text, [[ADD], [FINAL]]),
}
"""A script, and the sampled answers in each path. Nothing is sampled in two paths, so that nothing is trained twice."""


@pytest.mark.parametrize("case", CASES)
async def test_an_unchanged_agent_has_the_tokens_of_the_engine_and_the_right_tree(
    runner: Callable[..., AgentRunner],
    current: CurrentScript,
    engine: LoggedFake,
    trajectory: Trajectory,
    session: GenerateSession,
    tmp_path: Path,
    case: str,
) -> None:
    current.script, expected = CASES[case]
    failure = await runner(case.partition("-")[0])(trajectory, session)
    assert failure is None, log_text(tmp_path)
    assert (trajectory.reward, trajectory.status) == (1.0, SampleStatus.completed), log_text(tmp_path)
    assert sampled_pairs(trajectory) == engine.pairs()
    assert conversations(trajectory) == expected
    assert trajectory.metadata["num_conversations"] == len(expected)
    samples = trajectory.samples()
    trained = [token for each in samples for token in np.asarray(each.response_ids)[each.loss_mask == 1]]
    assert len(trained) == trajectory.num_sampled == sum(len(each.output_ids) for each in engine.entries)


@pytest.mark.slow
def test_the_exceptions_that_are_graded_are_those_of_the_frameworks() -> None:
    # Imported here: the three of them take ten seconds, which the other tests spend in processes.
    import agents.exceptions
    import pydantic_ai.exceptions
    import smolagents.utils

    modules = (agents.exceptions, pydantic_ai.exceptions, smolagents.utils)
    assert all(any(hasattr(module, name) for module in modules) for name in POLICY_ERRORS)
