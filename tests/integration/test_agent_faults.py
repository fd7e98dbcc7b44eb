"""Runs in which tools time out, environments crash and an engine dies: the ledger has what was injected, no more."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from rlscale.agents.environment_log import read_episodes
from rlscale.crashtest.check_ledger import check_ledger, read_ledger
from rlscale.crashtest.compare import check_samples
from tests.integration.conftest import REWARDED, Command

DUMPS = 'debug.save_rollout_data="dumps/{rollout_id}.jsonl"'
AGENT = ("model=tiny_qwen3_agent", "eval.interval=null", "eval.prompt_data=null", DUMPS)

TIMES_OUT = 0.3
NUM_CALLS, NUM_ATTEMPTS = 2, 3  # of an attempt, of a trajectory

TOOLS = """
import asyncio, random, time
from pathlib import Path
from rlscale.agents import tool


def is_late(trajectory, turn):
    file = Path("calls", f"{trajectory}-{turn}")
    number = file.stat().st_size if file.exists() else 0
    with file.open("a") as log:
        log.write("x")
    return random.Random(f"{trajectory}/{turn}/{number}").random() < 0.3


@tool
def slow(trajectory: int, turn: int) -> str:
    if is_late(trajectory, turn):
        time.sleep(1000)
    return "7"


@tool
async def later(trajectory: int, turn: int) -> str:
    if is_late(trajectory, turn):
        await asyncio.sleep(1000)
    return "7"


def answer(text, request):
    # The id of a request is train-<group>-<trajectory>-<turn>.
    trajectory, turn = int(request.rid.split("-")[2]), text.count("<|tool|>")
    return "42" if turn == 2 else f"<|call|>{('slow', 'later')[trajectory % 2]} {trajectory} {turn}"
"""


def plan_calls(num_trajectories: int) -> tuple[Counter[str], set[int], int]:
    """Calls by trajectory and turn, trajectories that fail, and restarts, as the draws of the tools have them."""
    calls, failed, retries = Counter[str](), set[int](), 0
    for trajectory in range(num_trajectories):
        for attempt in range(NUM_ATTEMPTS):
            for turn in range(NUM_CALLS):
                name = f"{trajectory}-{turn}"
                is_late = random.Random(f"{trajectory}/{turn}/{calls[name]}").random() < TIMES_OUT
                calls[name] += 1
                if is_late:
                    break
            else:
                break
            if attempt + 1 < NUM_ATTEMPTS:
                retries += 1
            else:
                failed.add(trajectory)
    return calls, failed, retries


def outcomes(command: Command, outcome: str) -> set[int]:
    """Trajectories with an outcome, in all rollouts."""
    return {i for page in read_ledger(command.run_dir / "ledger.jsonl").values() for i in page.get(outcome, ())}


def check_books(command: Command, *, num_trained: int) -> None:
    """Nothing is lost or counted twice, and no process is left."""
    dumps = command.folder / "dumps"
    assert check_ledger(command.run_dir / "ledger.jsonl", dumps) == []
    assert check_samples(dumps, num_groups=4, max_staleness=0) == []
    lines = [line for file in dumps.iterdir() for line in file.read_text().splitlines()]
    trained = Counter(each["sample_index"] for each in map(json.loads, lines) if each["status"] != "failed")
    assert set(trained.values()) == {1} and len(trained) == num_trained
    assert command.left_over() == {}


@pytest.mark.nightly
def test_tools_of_which_a_third_times_out(command: Command) -> None:
    """The real tools and engine of a run; a script decides the calls, so that each trajectory makes two of them."""
    (command.folder / "late_tools.py").write_text(TOOLS)
    (command.folder / "calls").mkdir()
    done = command.run(
        *AGENT,
        "rollout=scripted",
        "data.num_rollout=2",
        "rollout.max_response_len=80",
        "model.max_position_embeddings=512",
        "rollout.script_path=late_tools:answer",
        "debug.rollout_only=true",
        "agent.tools=[late_tools:slow,late_tools:later]",
        "agent.tool_timeout_s=3",
        "agent.on_tool_error=fail",
        f"sampling.max_retries={NUM_ATTEMPTS - 1}",
        "sampling.max_failed_share=1",
    )
    assert done.code == 0, done.err
    calls, failed, retries = plan_calls(32)
    made = {file.name: file.stat().st_size for file in (command.folder / "calls").iterdir()}
    assert made == dict(calls)
    share = (retries + len(failed)) / calls.total()
    assert failed and 0.2 < share < 0.4, "the draws are those that the test is about"
    assert outcomes(command, "failed/tool") == failed and outcomes(command, "trained") == set(range(32)) - failed
    assert sum(each.get("trajectory/retries", 0) for each in command.metrics()) == retries
    check_books(command, num_trained=32 - len(failed))


GAME = """
import asyncio, os, random
from pathlib import Path
from rlscale.agents import StepResult


class Game:
    def reset(self, task):
        file = Path("resets", str(task.seed))
        attempt = file.stat().st_size if file.exists() else 0
        with file.open("a") as log:
            log.write("x")
        draw = random.Random(f"{task.seed}/{attempt}").random()
        self.fault = None if attempt > 1 else "late" if draw < 0.3 else "crash" if draw < 0.36 else None
        if random.Random(f"{task.seed}/lost").random() < 0.1:
            raise RuntimeError("the level is lost")
        self.left = 2
        return task.messages

    async def step(self, action):
        self.left -= 1
        if self.fault == "late":
            await asyncio.sleep(1000)
        if self.fault == "crash":
            os._exit(3)
        return StepResult(messages="again", reward=len(action.text) % 3 / 2, done=not self.left)
"""


@pytest.mark.nightly
def test_environments_that_are_late_and_crash_at_random(command: Command) -> None:
    """A crash ends the other environments of its process, too; each starts again."""
    (command.folder / "frail_game.py").write_text(GAME)
    (command.folder / "resets").mkdir()
    done = command.run(
        *AGENT,
        "rollout.max_response_len=300",
        "model.max_position_embeddings=1024",
        "agent.environment_path=frail_game:Game",
        "agent.environment_timeout_s=4",
        "sampling.max_retries=5",
        "sampling.max_failed_share=1",
    )
    assert done.code == 0, done.err
    episodes = read_episodes(command.run_dir / "environments")
    seeds = {each["trajectory"]: each["seed"] for each in episodes}
    assert len(set(seeds.values())) == len(seeds) == 48
    lost = {i for i, seed in seeds.items() if random.Random(f"{seed}/lost").random() < 0.1}
    assert lost, "the draws are those that the test is about"
    assert outcomes(command, "failed/environment") == lost and outcomes(command, "trained") == set(range(48)) - lost
    # Each attempt is an episode, and each that failed is a restart or the last one of a lost trajectory.
    failed = [each for each in episodes if each["end"].startswith("failed: ")]
    causes = Counter(each["end"] for each in failed)
    assert all(any(part in cause for cause in causes) for part in ("timeout_s=4", "code 3", "is lost")), causes
    retries = sum(each.get("trajectory/retries", 0) for each in command.metrics())
    assert len(failed) == retries + len(lost)
    # The game counts its resets; a process that another environment ended may not have begun one that was sent to it.
    resets = Counter({int(file.name): file.stat().st_size for file in (command.folder / "resets").iterdir()})
    unsure = Counter(each["seed"] for each in failed if not each["start"] and "code 3" in each["end"])
    begun = Counter(each["seed"] for each in episodes)
    assert resets <= begun <= resets + unsure, (begun - resets, resets - begun, unsure)
    check_books(command, num_trained=48 - len(lost))


KILLER = """
import json, os, signal, urllib.request
from pathlib import Path


def kill_engine():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, marked = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"rlscale.cli.serve\\0" in words and os.environ["RLSCALE_TEST_MARK"].encode() in marked:
            os.kill(int(folder.name), signal.SIGKILL)


def agent(task, session):
    messages = list(task.messages)
    for turn in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {session.api_key}"}
        request = urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            messages += [json.load(response)["choices"][0]["message"], {"role": "user", "content": "1+1="}]
        if task.id == 20 and turn == 0:
            kill_engine()
    return float(task.id % 2)
"""


@pytest.mark.nightly
@pytest.mark.own_ray
def test_an_engine_that_restarts_answers_no_agent_before_it_has_the_weights(command: Command) -> None:
    """No attempt is lost: requests wait in the gateway for the weights of the second rollout."""
    (command.folder / "killer.py").write_text(KILLER)
    done = command.run(
        *AGENT,
        REWARDED,
        "rollout.max_response_len=8",
        "agent.function_path=killer:agent",
        "agent.timeout_s=200",
        "fault_tolerance.enabled=true",
        "sampling.max_retries=0",
        timeout_s=600,
    )
    assert done.code == 0, done.err
    assert "restarting engine 0" in done.out + done.err
    assert outcomes(command, "trained") == set(range(48))
    check_books(command, num_trained=48)
    samples = [json.loads(line) for line in (command.folder / "dumps" / "1.jsonl").read_text().splitlines()]
    assert {version for each in samples for version in each["weight_versions"]} == {1}
    assert not list(Path(command.run_dir, "gateway").iterdir())
