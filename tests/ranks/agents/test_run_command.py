"""Agents in separate processes: what they get, how they end, and that nothing of them is left."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlscale.agents.agent_runner import Agent, AgentLimits, AgentRunner
from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_function import process_agent
from rlscale.agents.run_log import AgentLogs
from rlscale.cluster.process_reaper import marked_processes
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import FailureCause, Prompt, SampleStatus, SamplingParams
from tests.agent_gateway import FakeGateway

MARK = "RLSCALE_TEST_MARK"

CHAT = """
import json, os, sys, time, urllib.request

def chat(messages, url=None, key=None):
    body = json.dumps({"model": os.environ.get("RLSCALE_MODEL", "policy"), "messages": messages}).encode()
    key = key or os.environ["OPENAI_API_KEY"]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    url = (url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway().start()
    yield gateway
    gateway.stop()


@pytest.fixture
def session() -> GenerateSession:
    pool = cast(EnginePool, None)  # the gateway has the engines
    return GenerateSession(params=SamplingParams(max_new_tokens=50), rid="train-2-8", pool=pool, versions=(0, 0))


@pytest.fixture
def trajectory() -> Trajectory:
    prompt = Prompt(index=3, text="2+2=", token_ids=(1, 2), label="4", metadata={"level": 1})
    return Trajectory(id=8, group_index=2, prompt=prompt, seed=5)


@pytest.fixture
def mark() -> Iterator[str]:
    """A variable of all processes of a test; none of them may be left."""
    mark = uuid.uuid4().hex
    yield mark
    assert marked_processes(mark, variable=MARK) == []


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> Callable[[str], CommandAgent]:
    """An agent that is a program with the function `chat`."""
    monkeypatch.chdir(tmp_path)

    def write(program: str) -> CommandAgent:
        Path("my_agent.py").write_text(CHAT + program)
        return CommandAgent(command=["python", "my_agent.py", "{task_file}"], env={MARK: mark})

    return write


Run = Callable[..., AgentRunner]


@pytest.fixture
def runner(gateway: FakeGateway, tmp_path: Path) -> Run:
    def build(agent: Agent, *, timeout_s: float = 60.0, max_turns: int | None = None) -> AgentRunner:
        return AgentRunner(
            gateway,
            agent,
            AgentLimits(timeout_s=timeout_s, max_turns=max_turns),
            logs=AgentLogs(tmp_path / "agents", keep=100, max_bytes=10_000),
            admission=AgentAdmission(8),
        )

    return build


def log_text(tmp_path: Path) -> str:
    return (tmp_path / "agents" / "0" / "8.log").read_text()


async def test_a_command_gets_its_task_and_returns_its_reward(
    runner: Run,
    command: Callable[[str], CommandAgent],
    trajectory: Trajectory,
    session: GenerateSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret of the run")
    monkeypatch.setenv("SEARCH_API_KEY", "for the agent")
    agent = command("""
task = json.load(open(sys.argv[1]))
assert sys.argv[1] == os.environ["RLSCALE_TASK"], sys.argv
assert "HF_TOKEN" not in os.environ and os.environ["SEARCH_API_KEY"] == "for the agent"
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
open("scratch.txt", "w").write(os.getcwd())
print("folder", os.getcwd(), os.listdir())
answer = chat(task["messages"])
result = {"reward": float(answer == task["label"]), "metadata": {"level": task["metadata"]["level"]}}
json.dump(result, open(os.environ["RLSCALE_RESULT"], "w"))
""")
    agent = replace(agent, pass_env=["SEARCH_API_KEY"])
    assert await runner(agent)(trajectory, session) is None, log_text(tmp_path)
    assert (trajectory.reward, trajectory.status) == (1.0, SampleStatus.completed)
    assert trajectory.metadata["level"] == 1 and [turn.text for turn in trajectory.turns] == ["4"]
    folder = log_text(tmp_path).partition("folder ")[2].split()[0]
    assert "'scratch.txt'" in log_text(tmp_path) and not Path(folder).exists() and folder != str(tmp_path)


@pytest.mark.parametrize(
    ("program", "cause", "message"),
    [
        ("print('no corpus'); sys.exit(3)", "controller", "it exited with code 3; its last output: no corpus"),
        ("chat([]); raise ValueError('tool')", "controller", "with code 1; its last output: ValueError: tool"),
        ("os.kill(os.getpid(), 9)", "environment", "its process was ended by SIGKILL"),
        ("os.abort()", "environment", "its process was ended by SIGABRT"),
        ("open(os.environ['RLSCALE_RESULT'], 'w').write('{')", "controller", "its result must be JSON"),
        ("open(os.environ['RLSCALE_RESULT'], 'w').write(' ' * 2**21)", "controller", "must have at most 1048576 bytes"),
        ("pass", "controller", "it ended without a request that was answered"),
    ],
)
async def test_ends_without_a_result_are_failures(
    runner: Run,
    command: Callable[[str], CommandAgent],
    trajectory: Trajectory,
    session: GenerateSession,
    program: str,
    cause: str,
    message: str,
) -> None:
    failure = await runner(command(program))(trajectory, session)
    assert failure is not None and failure.cause == cause and message in failure.message
    assert trajectory.reward is None


async def test_a_command_that_cannot_be_executed_is_a_failure(
    runner: Run, trajectory: Trajectory, session: GenerateSession
) -> None:
    failure = await runner(CommandAgent(command=["./no-such-agent"]))(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.controller
    assert "exited with code 127; its last output: ./no-such-agent cannot be executed" in failure.message


async def test_a_policy_error_in_the_last_line_of_a_traceback_is_graded(
    runner: Run, command: Callable[[str], CommandAgent], trajectory: Trajectory, session: GenerateSession
) -> None:
    agent = command("""
class TurnsUsedUp(Exception): __module__ = "my_framework.errors"
chat([]); raise TurnsUsedUp("3 of 3")
""")
    agent = replace(agent, policy_errors=("TurnsUsedUp",))
    failure = await runner(agent)(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.policy
    assert failure.message == "my_framework.errors.TurnsUsedUp: 3 of 3"


async def test_an_agent_may_exit_as_it_likes_if_it_names_the_policy(
    runner: Run, command: Callable[[str], CommandAgent], trajectory: Trajectory, session: GenerateSession
) -> None:
    agent = command("""
chat([])
json.dump({"failure": "policy", "message": "no such tool"}, open(os.environ["RLSCALE_RESULT"], "w"))
sys.exit(1)
""")
    failure = await runner(agent)(trajectory, session)
    assert failure is not None and (failure.cause, failure.message) == (FailureCause.policy, "no such tool")


SPAWNS = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, subprocess, sys, time; signal.signal(15, 1);"
grandchild = child + "time.sleep(600)"
# In a separate session, and with a parent that ends: only the supervisor can find it.
subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({[sys.executable, '-c', grandchild]!r},"
                " start_new_session=True)"])
subprocess.Popen([sys.executable, "-c", grandchild])
chat([])
print("ready")
"""


@pytest.mark.parametrize("end", ["end", "late", "cancelled"])
async def test_no_process_is_left(
    gateway: FakeGateway,
    runner: Run,
    command: Callable[[str], CommandAgent],
    trajectory: Trajectory,
    session: GenerateSession,
    tmp_path: Path,
    mark: str,
    end: str,
) -> None:
    agent = command(SPAWNS + ("" if end == "end" else "time.sleep(600)"))
    running = asyncio.ensure_future(runner(agent, timeout_s=3.0 if end == "late" else 60.0)(trajectory, session))
    if end == "cancelled":
        while not (tmp_path / "agents" / "0" / "8.log").exists() or "ready" not in log_text(tmp_path):
            await asyncio.sleep(0.05)
        assert len(marked_processes(mark, variable=MARK)) == 4
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        failure = await running
        assert (failure is None) == (end == "end")
        assert end == "end" or "took longer than agent.timeout_s=3" in (failure.message if failure else "")
    assert not gateway.open


async def test_all_processes_end_when_the_run_is_killed(
    gateway: FakeGateway, command: Callable[[str], CommandAgent], mark: str, tmp_path: Path
) -> None:
    command(SPAWNS + "open('ready', 'w'); time.sleep(600)")
    program = """
import asyncio, os, sys
from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_log import AgentLogs
from rlscale.agents.run_task import AgentSession, AgentTask
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt
from pathlib import Path
prompt = Prompt(index=0, text="", token_ids=(1,))
log = AgentLogs(Path("agents"), keep=1, max_bytes=1000).open(
    Trajectory(id=8, group_index=0, prompt=prompt, seed=0), rid="train-0", version=0)
session = AgentSession(base_url=sys.argv[1], anthropic_url="", api_key=sys.argv[2])
asyncio.run(CommandAgent(command=["python", "my_agent.py"]).run(AgentTask(id=8, row=0, messages=[]), session, log))
"""
    prompt = Prompt(index=0, text="", token_ids=(1,))
    access = await gateway.open_session(
        Trajectory(id=8, group_index=0, prompt=prompt, seed=0), SamplingParams(max_new_tokens=9), lifetime_s=60
    )
    run = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", program, gateway.url, access.api_key], env={**os.environ, MARK: mark}
    )
    while not (tmp_path / "agents" / "0" / "8.log").exists() or "ready" not in log_text(tmp_path):
        await asyncio.sleep(0.05)
        assert run.returncode is None
    assert len(marked_processes(mark, variable=MARK)) == 5
    run.send_signal(signal.SIGKILL)
    await run.wait()
    async with asyncio.timeout(30):
        while marked_processes(mark, variable=MARK):
            await asyncio.sleep(0.05)
    await gateway.drop(access.id)


async def test_a_long_output_blocks_nothing_and_its_end_is_in_the_log(
    runner: Run,
    command: Callable[[str], CommandAgent],
    trajectory: Trajectory,
    session: GenerateSession,
    tmp_path: Path,
) -> None:
    agent = command("chat([]); sys.stdout.write('x' * 50_000_000); print('the end')")
    assert await runner(agent)(trajectory, session) is None
    text = log_text(tmp_path)
    assert len(text) < 20_000 and "bytes dropped]" in text and "the end" in text


FUNCTIONS = """
import asyncio, json, os, urllib.request

def plain(task, session):
    from my_agent import chat
    return float(chat(task.messages, session.base_url, session.api_key) == task.label)

async def coroutine(task, session):
    return {"reward": await asyncio.to_thread(plain, task, session), "metadata": {"pid": os.getpid()}}

class TurnsUsedUp(Exception):
    pass

def raises(task, session):
    plain(task, session)
    raise TurnsUsedUp("3 turns")

def crashes(task, session):
    os.kill(os.getpid(), 11)

def leaves(task, session):
    os._exit(5)
"""


async def test_functions_run_in_separate_processes(
    runner: Run,
    command: Callable[[str], CommandAgent],
    trajectory: Trajectory,
    session: GenerateSession,
    tmp_path: Path,
    mark: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command("")
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)

    def function(name: str) -> CommandAgent:
        return process_agent(f"my_functions:{name}", env={MARK: mark}, policy_errors=["TurnsUsedUp"])

    for name in ("plain", "coroutine"):
        trajectory.restart()
        assert await runner(function(name))(trajectory, session) is None, log_text(tmp_path)
        assert trajectory.reward == 1.0
    assert trajectory.metadata["pid"] != os.getpid()
    failure = await runner(function("raises"))(trajectory, session)
    assert failure is not None and (failure.cause, failure.message) == (FailureCause.policy, "TurnsUsedUp: 3 turns")
    failure = await runner(function("crashes"))(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.environment and "SIGSEGV" in failure.message
    failure = await runner(function("leaves"))(trajectory, session)
    assert failure is not None and failure.cause == FailureCause.controller and "exited with code 5" in failure.message
