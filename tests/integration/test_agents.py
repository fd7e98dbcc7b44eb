"""Agents in a run: tools and environments with faults; nothing is lost, and every environment is closed."""

from collections import Counter

import pytest

from rlscale.agents.environment_log import read_episodes
from tests.integration.conftest import Command

GAME = """
import os
from rlscale.agents import StepResult

def log(text):
    with open("leases", "a") as file: file.write(text + "\\n")

class Game:
    def __init__(self):
        log("open")

    def reset(self, task):
        self.number = 0
        if not os.path.exists(f"row-{task.index}"):
            open(f"row-{task.index}", "w").close()
            raise RuntimeError("the level is lost")
        if task.index % 4 == 0 and not os.path.exists(f"crash-{task.index}"):
            open(f"crash-{task.index}", "w").close()
            os._exit(3)
        return task.messages

    async def step(self, action):
        self.number += 1
        reward = sum(each in "0123456789" for each in action.text) / 10
        return StepResult(messages="again", reward=reward, done=self.number == 2)

    def close(self):
        log("close")
"""

AGENT = ("model=tiny_qwen3_agent", "data.num_rollout=2", "eval.interval=null", "rollout.max_response_len=80")


@pytest.mark.nightly
def test_a_run_in_an_environment_that_crashes(command: Command) -> None:
    (command.folder / "my_game.py").write_text(GAME)
    done = command.run(
        *AGENT, "agent.environment_path=my_game:Game", "agent.max_concurrent=5", "sampling.max_retries=8"
    )
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert len(steps) == 2
    assert sum(m.get("trajectory/retries", 0) for m in steps) > 0
    # A failure is no reward: all trajectories have ended by themselves, at most two turns later.
    assert all(m["agent/turns_max"] <= 2 and m["trajectory/forks"] == 0 for m in steps)
    assert all(m["reward/max"] > 0 for m in steps)
    leases = Counter((command.folder / "leases").read_text().split())
    # A process that exits closes nothing; the others have.
    assert 32 <= leases["close"] <= leases["open"]
    assert not command.left_over()
    # Every attempt of the 32 trajectories has an episode in the log.
    episodes = read_episodes(command.run_dir / "environments")
    assert {each["trajectory"] for each in episodes if each["end"] == "done"} <= set(range(32))
    retries = sum(m.get("trajectory/retries", 0) for m in steps)
    assert len(episodes) == 32 + retries and any(each["end"].startswith("failed: ") for each in episodes)
