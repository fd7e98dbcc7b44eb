"""The server of an environment of `verifiers`, with the real library in its environment."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlscale.agents.run_log import TrajectoryLog
from rlscale.agents.run_remote import RemoteAgent
from rlscale.agents.run_task import AgentFailed, AgentResult, AgentSession, AgentTask
from rlscale.agents.verifiers_server import NO_LABEL
from rlscale.engines.ports import free_port
from rlscale.trajectory import Trajectory
from rlscale.types import FailureCause, Prompt, SamplingParams
from tests.agent_gateway import FakeGateway

ROOT = Path(__file__).parents[3]
PYTHON = "RLSCALE_VERIFIERS_PYTHON"
"""Environment variable with the Python of an environment that has verifiers."""

SUMS = '''
import asyncio

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, task, trace) -> float:
        return float(trace.assistant_messages[-1].content == task.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield SumTask(SumData(prompt=f"{number}+{number}=", answer=str(2 * number)), self.config.task)
            number += 1


class Asks(vf.Harness[vf.HarnessConfig]):
    """Asks twice; the fourth task waits forever."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **further):
        messages = [{"role": "user", "content": data.prompt}]
        if data.idx == 3:
            await asyncio.Event().wait()
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "sure?"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Asks", "Sums"]
'''
CONFIG = '[env.taskset]\nid = "rlscale_sums"\n\n[env.agent.runtime]\ntype = "subprocess"\n'


@pytest.fixture(
    params=["present", pytest.param("new", marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])], scope="module"
)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that has verifiers, and nothing of rlscale's packages."""
    if request.param == "present":
        if (found := os.environ.get(PYTHON)) is None:
            pytest.skip(f"{PYTHON} must name a Python with verifiers, which needs older packages than these tests")
        return found
    folder = tmp_path_factory.mktemp("verifiers")
    interpreter = str(folder / "bin" / "python")
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("verifiers==")]
    for command in ([sys.executable, "-m", "venv", str(folder)], [interpreter, "-m", "pip", "install", "-q", pin]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return interpreter


@pytest.fixture(scope="module")
def command(python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """The command of the server, and its environment variables."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "rlscale_sums.py").write_text(SUMS)
    (folder / "env.toml").write_text(CONFIG)
    paths = os.pathsep.join([str(ROOT / "src"), str(folder)])
    env = {**os.environ, "PYTHONPATH": paths, "RLSCALE_AGENT_API_KEY": "server-key"}
    return [python, "-m", "rlscale.agents.verifiers_server", str(folder / "env.toml")], env


@pytest.fixture(scope="module")
def url(command: tuple[list[str], dict[str, str]]) -> Iterator[str]:
    words, env = command
    port = free_port("127.0.0.1")
    process = subprocess.Popen([*words, f"--port={port}"], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening at http://127.0.0.1:{port}/run\n"
        yield f"http://127.0.0.1:{port}/run"
    finally:
        process.terminate()
        assert process.wait(30) == 0, "the server ends in order"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway(lambda messages: "4").start()
    yield gateway
    gateway.stop()


async def play(url: str, gateway: FakeGateway, index: int, *, key: str = "server-key", timeout_s: float = 60) -> Any:
    """The result of an episode, or how it failed, and the turns that the gateway recorded."""
    empty = Trajectory(id=index, group_index=0, prompt=Prompt(index=0, text="", token_ids=(1,)), seed=0)
    access = await gateway.open_session(empty, SamplingParams(max_new_tokens=50), lifetime_s=60)
    task = AgentTask(id=index, row=0, messages=[], metadata={"verifiers_task": index})
    agent, found = RemoteAgent(url, timeout_s=timeout_s, api_key=key), None
    try:
        found = await agent.run(task, AgentSession.from_access(access), TrajectoryLog(BytesIO(), max_bytes=1000))
    except AgentFailed as error:
        found = error
    finally:
        await agent.close()
    return found, [turn.text for turn in gateway.open[access.id].tree.turns if turn.sampled]


async def test_episodes_have_the_rewards_of_the_environment(url: str, gateway: FakeGateway) -> None:
    async with aiohttp.ClientSession() as http, http.get(url.replace("/run", "/health")) as response:
        assert await response.json() == {"env": "rlscale_sums"}
    wrong, right, refused = await asyncio.gather(
        play(url, gateway, 1), play(url, gateway, 2), play(url, gateway, 0, key="x")
    )
    metadata = {"verifiers": {"metrics": {"turns": 2.0}, "stop": "agent_completed"}}
    # Each session has its turns, although the episodes run in one process.
    assert wrong == (AgentResult(reward=0.0, metadata=metadata), ["4", "4"])
    assert right == (AgentResult(reward=1.0, metadata=metadata), ["4", "4"])
    assert "must be that of RLSCALE_AGENT_API_KEY" in refused[0].message and refused[1] == []


async def test_an_episode_without_a_reward_has_failed(url: str, gateway: FakeGateway) -> None:
    failed, turns = await play(url, gateway, 3, timeout_s=1.0)
    assert failed.cause == FailureCause.environment and "TimeoutError" in failed.message and not turns
    gateway.num_failing = 1
    failed, turns = await play(url, gateway, 2)
    assert failed.cause == FailureCause.environment and "the episode failed: ProviderError" in failed.message
    assert not turns, "nothing was answered, and no reward hides that"


def test_prompts_name_their_tasks(command: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    words, env = command
    subprocess.run([*words, f"--write-prompts={tmp_path / 'prompts.jsonl'}", "--limit=2"], env=env, check=True)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert rows == [
        {"input": "0+0=", "label": NO_LABEL, "metadata": {"verifiers_task": 0}},
        {"input": "1+1=", "label": NO_LABEL, "metadata": {"verifiers_task": 1}},
    ]
