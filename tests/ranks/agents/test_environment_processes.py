"""Environments in processes: what one does harms no other, and each is closed whatever happens."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rlscale.agents.environment import Action, Task
from rlscale.agents.environment_agent import EnvironmentAgent
from rlscale.agents.environment_child import EnvironmentSpec
from rlscale.agents.environment_log import EnvironmentLog, read_episodes
from rlscale.agents.environment_pool import EnvironmentFailed, EnvironmentPool
from rlscale.config.groups.agent import AgentConfig, EnvironmentReward
from rlscale.rewards.call_process import CallProcess
from rlscale.trajectory import Trajectory
from rlscale.types import AGENT, FailureCause, SampleStatus
from tests.scripted_policy import CharacterRenderer, ScriptedPool, new_trajectory, open_session
from tests.scripted_vision import VisionPool, open_vision_model, vision_session
from tests.tiny_vision import draw

MODULE = """
import asyncio, ctypes, os, time
from PIL import Image
from rlscale.agents import Observation, StepResult

LOG = os.path.join(os.path.dirname(__file__), "leases")

def log(text):
    with open(LOG, "a") as file: file.write(text + "\\n")

class Game:
    def __init__(self):
        log(f"open {id(self)}-{os.getpid()}")

    def reset(self, task):
        self.task, self.number = task, 0
        if task.messages[0]["content"] == "bad reset": raise RuntimeError("no level")
        return f"guess {task.label}"

    def step(self, action):
        self.number += 1
        kind = action.text
        if kind == "raise": raise ValueError("no such move")
        if kind == "_exit": os._exit(4)
        if kind == "segfault": ctypes.string_at(0)
        if kind == "sleep": time.sleep(1000)
        if kind == "nan": return StepResult(reward=float("nan"), done=True)
        if kind == "nothing": return None
        if kind == "object": return StepResult(done=True, metadata={"a": object()})
        if kind == "surrogate": return StepResult(messages="a\\ud83db")
        if kind == "long": return StepResult(messages="z" * 10_000_000)
        if kind == "win": return StepResult(reward=1.0, done=True, metadata={"moves": self.number, "agent": 1})
        return StepResult(messages=f"{kind}?", reward=0.25)

    def close(self):
        log(f"close {id(self)}-{os.getpid()}")

class StuckGame(Game):
    def close(self):
        time.sleep(1000)

class AsyncGame(Game):
    async def reset(self, task):
        self.number = 0
        await asyncio.sleep(0)
        return Observation(messages=[{"role": "system", "content": "rules"}, {"role": "user", "content": "go"}])

    async def step(self, action):
        if action.text == "wait": await asyncio.sleep(1000)
        if action.text == "block": time.sleep(1000)
        await asyncio.sleep(0)
        return Game.step(self, action)

    async def close(self):
        await asyncio.sleep(0)
        Game.close(self)

class Camera:
    # Shows the row, then another picture after each move.
    def reset(self, task):
        self.number = 0
        return list(task.messages)

    def step(self, action):
        self.number += 1
        if self.number == 3: return StepResult(done=True, reward=1.0)
        picture = Image.new("RGB", (16, 8 * self.number), "red")
        return StepResult(messages=[{"role": "user", "content": ["now", {"type": "image", "image": picture}]}])

def with_level(custom):
    game = Game()
    game.reset = lambda task: f"level {custom['level']}"
    return game
"""
TASK = Task(index=0, messages=({"role": "user", "content": "a"},), label=7)
Open = Callable[..., EnvironmentPool]


@pytest.fixture
async def open_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    (tmp_path / "games_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pools: list[EnvironmentPool] = []

    def make(name: str = "Game", *, timeout_s: float = 20.0, processes: int = 1, **custom: object) -> EnvironmentPool:
        config = AgentConfig(environment_timeout_s=timeout_s, environment_processes=processes)
        spec = EnvironmentSpec(path=f"games_of_test:{name}", custom=dict(custom), max_chars=100)
        pools.append(EnvironmentPool(spec, config))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
        assert pool.num_open == 0


def leases(folder: Path) -> Counter[str]:
    """Environments that were opened and not closed, by name."""
    counts: Counter[str] = Counter()
    for line in (folder / "leases").read_text().splitlines():
        kind, name = line.split()
        counts[name] += 1 if kind == "open" else -1
    return +counts


async def play(pool: EnvironmentPool, action: str, task: Task = TASK) -> object:
    """The reward of an action, or why there is none."""
    try:
        async with pool.open() as game:
            await game.reset(task)
            return (await game.step(Action(text=action)))["reward"]
    except EnvironmentFailed as error:
        return str(error)


async def test_environments_of_one_process_do_not_harm_each_other(open_pool: Open, tmp_path: Path) -> None:
    pool = open_pool(timeout_s=3.0)
    actions = ["up", "win", "raise", "nan", "nothing", "object", "sleep", "win"]
    found = await asyncio.gather(*[play(pool, action) for action in actions])
    assert found[:2] == [0.25, 1.0] and found[-1] == 1.0
    assert str(found[2]).startswith("step failed: ValueError: no such move (games_of_test.py:")
    assert "the reward of a step must be a finite number, got nan" in str(found[3])
    assert "step must return a StepResult, got NoneType" in str(found[4])
    assert "its values must be those of JSON" in str(found[5])
    assert str(found[6]).startswith("step did not return within agent.environment_timeout_s=3")
    await pool.close()
    assert (pool.num_opened, pool.num_open) == (8, 0)
    assert not leases(tmp_path)


@pytest.mark.parametrize(("action", "cause"), [("_exit", "exited with code 4"), ("segfault", "ended by SIGSEGV")])
async def test_a_crash_is_replaced_by_another_process(open_pool: Open, action: str, cause: str) -> None:
    pool = open_pool()
    assert cause in str(await play(pool, action))
    assert await play(pool, "win") == 1.0


async def test_an_environment_that_blocks_ends_its_process(open_pool: Open) -> None:
    pool = open_pool("AsyncGame", timeout_s=3.0)
    other = asyncio.create_task(play(pool, "wait"))
    assert "did not return within agent.environment_timeout_s=3" in str(await play(pool, "block"))
    # The other one has the same deadline; whichever is seen first, it has no reward.
    assert "agent.environment_timeout_s=3" in str(await other) or "another environment blocked it" in str(await other)
    assert await play(pool, "win") == 1.0


async def test_an_environment_is_closed_whatever_happens(open_pool: Open, tmp_path: Path) -> None:
    pool = open_pool("AsyncGame", processes=2)
    tasks = [asyncio.create_task(play(pool, "wait")) for _ in range(6)]
    bad = Task(index=0, messages=({"role": "user", "content": "bad reset"},))
    assert await play(pool, "win", bad) == 1.0  # this class ignores the task
    while len((tmp_path / "leases").read_text().splitlines()) < 8:  # 7 are open, 1 closed
        await asyncio.sleep(0.01)
    for task in tasks[:3]:
        task.cancel()
    await asyncio.wait(tasks[:3])
    # The others are open when the run ends.
    for task in tasks[3:]:
        task.cancel()
    pool.kill()
    assert not leases(tmp_path)
    assert (pool.num_opened, pool.num_open) == (7, 0)


async def test_a_failed_reset_is_closed_too(open_pool: Open, tmp_path: Path) -> None:
    pool = open_pool()
    bad = Task(index=0, messages=({"role": "user", "content": "bad reset"},))
    assert str(await play(pool, "win", bad)).startswith("reset failed: RuntimeError: no level")
    await pool.close()
    assert not leases(tmp_path)


async def test_a_close_that_never_ends_is_awaited_once(open_pool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = CallProcess.wait
    monkeypatch.setattr(CallProcess, "wait", lambda self, limit_s: (waits.append(limit_s), wait(self, limit_s)))
    monkeypatch.setattr("rlscale.agents.environment_pool.CLOSE_GRACE_S", 2.0)
    pool = open_pool("StuckGame")
    assert await play(pool, "win") == 1.0
    await pool.close()
    # The two seconds have passed before: now the process has one more, and not two.
    assert pool.num_open == 0 and waits and max(waits) <= 1.0


async def test_an_environment_gets_the_custom_values(open_pool: Open) -> None:
    async with open_pool("with_level", level=3).open() as game:
        assert (await game.reset(TASK))["messages"] == [{"role": "user", "content": "level 3"}]


async def test_a_lone_surrogate_of_an_observation_is_replaced(open_pool: Open) -> None:
    async with open_pool().open() as game:
        await game.reset(TASK)
        step = await game.step(Action(text="surrogate"))
    assert step["messages"] == [{"role": "user", "content": "a?b"}]


@pytest.mark.parametrize(("kind", "reward"), [(EnvironmentReward.sum, 1.5), (EnvironmentReward.last, 1.0)])
async def test_the_policy_acts_until_the_environment_is_done(
    open_pool: Open, kind: EnvironmentReward, reward: float
) -> None:
    moves = iter(["up", "long", "down", "win"])
    trajectory, requests = new_trajectory(), ScriptedPool(lambda ids: next(moves))
    agent = EnvironmentAgent(open_pool(), CharacterRenderer(), AgentConfig(environment_reward=kind))
    assert await agent(trajectory, open_session(requests)) is None
    assert (trajectory.status, trajectory.reward) == (SampleStatus.completed, reward)
    counts = trajectory.metadata[AGENT]
    assert counts["step_rewards"] == [0.25, 0.25, 1.0]
    assert (counts["turns"], trajectory.metadata["moves"]) == (4, 4)
    (sample,) = trajectory.samples()
    assert sample.tokens.tolist()[:-4] == requests.requests[-1]


async def test_an_episode_is_replayed_from_its_log(open_pool: Open, tmp_path: Path) -> None:
    log = EnvironmentLog(tmp_path / "environments", keep=10)
    moves = ["up", "down", "win"]

    async def play_all(pool: EnvironmentPool, actions: list[str]) -> Trajectory:
        trajectory, each = new_trajectory(number=3), iter(actions)
        agent = EnvironmentAgent(pool, CharacterRenderer(), AgentConfig(), log=log)
        trajectory.failure = await agent(trajectory, open_session(ScriptedPool(lambda ids: next(each))))
        return trajectory

    played = await play_all(open_pool(), moves)
    assert played.failure is None
    (episode,) = read_episodes(tmp_path / "environments")
    assert [step["action"]["text"] for step in episode["steps"]] == moves and episode["end"] == "done"
    assert (episode["trajectory"], episode["row"], episode["seed"]) == (3, 3, 3)
    config = AgentConfig(environment_processes=1)
    path = "rlscale.agents.environment_replay:ReplayedEnvironment"
    spec = EnvironmentSpec(path=path, custom={"environment_log": str(tmp_path / "environments" / "0.jsonl")})
    pool = EnvironmentPool(spec, config)
    try:
        again = await play_all(pool, moves)
        other = await play_all(pool, ["up", "left"])
    finally:
        await pool.close()
    (first,), (second,) = played.samples(), again.samples()
    assert first == second
    assert other.failure is not None and other.reward == 0.25  # a failure: the reward is not used
    assert "action 2 must be 'down' as in" in other.failure.message and "got 'left'" in other.failure.message
    episodes = read_episodes(tmp_path / "environments")
    assert [each["end"].partition(":")[0] for each in episodes] == ["done", "done", "failed"]


async def test_an_environment_shows_a_picture_in_every_turn(open_pool: Open, tmp_path: Path) -> None:
    model = open_vision_model(tmp_path)
    prompt = model.prompt(draw(16, 16))
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=0)
    requests = VisionPool(model.tokenizer, ("up", "down", "end"))
    log = EnvironmentLog(tmp_path / "environments", keep=10)
    pool = open_pool("Camera", timeout_s=60.0)
    agent = EnvironmentAgent(pool, model.renderer, AgentConfig(), log=log, images=model.images)
    assert await agent(trajectory, vision_session(requests, prompt)) is None
    (sample,) = trajectory.samples()
    # The row's picture, unchanged, and those of two steps.
    assert [image.grid for image in sample.images] == [(1, 4, 4), (1, 2, 4), (1, 4, 4)]
    assert sample.images[0].digest == prompt.images[0].digest and trajectory.reward == 1.0
    assert [len(images) for _, images in requests.requests] == [1, 2, 3]
    assert len(list((tmp_path / "environments" / "0.images").iterdir())) == 3
    text_agent = EnvironmentAgent(pool, CharacterRenderer(), AgentConfig())
    failure = await text_agent(new_trajectory(), open_session(ScriptedPool(lambda ids: "up")))
    assert failure is not None and "set data.multimodal_keys" in failure.message


async def test_a_failure_of_an_environment_is_no_reward(open_pool: Open) -> None:
    trajectory = new_trajectory(number=4)
    agent = EnvironmentAgent(open_pool(), CharacterRenderer(), AgentConfig())
    failure = await agent(trajectory, open_session(ScriptedPool(lambda ids: "raise")))
    assert failure is not None and failure.cause == FailureCause.environment and not failure.cause.is_graded
    assert failure.message.startswith(
        "trajectory 4 (prompt row 5): the environment's step failed: ValueError: no such move (games_of_test.py:"
    )
    assert trajectory.reward is None
