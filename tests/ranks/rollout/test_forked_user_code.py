"""User code that forks in a thread of the run, and whose child returns: the child ends, and the run has one result."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlscale.plugins.daemon_call import call_in_daemon
from rlscale.rollout.user_generate import ThreadSession, UserGenerate
from rlscale.trajectory import Trajectory
from tests.unit.control.simulation import NUM_PROMPTS, simulation
from tests.unit.control.test_sampling import outcomes

CHILDREN: list[int] = []


def fork() -> None:
    if child := os.fork():
        CHILDREN.append(child)


async def generate(trajectory: Trajectory, session: ThreadSession) -> None:
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    if trajectory.id == 0:
        fork()


def generate_plainly(trajectory: Trajectory, session: ThreadSession) -> None:
    asyncio.run(generate(trajectory, session))


@pytest.mark.parametrize("function", [generate, generate_plainly])
async def test_a_generate_function_whose_child_returns(tmp_path: Path, function: Callable[..., Any]) -> None:
    CHILDREN.clear()
    with simulation(tmp_path, num_rollouts=2, generate=UserGenerate(function, timeout_s=60.0)) as run:
        await run.loop.run()
    assert run.trained_groups == list(range(2 * NUM_PROMPTS))
    assert set(outcomes(run.pages).values()) == {"trained"}
    (child,) = CHILDREN
    assert os.waitpid(child, 0) == (child, 0)


async def test_a_hook_whose_child_returns() -> None:
    def hook(value: int) -> int:
        fork()
        return value + 1

    async def hook_later(value: int) -> int:
        fork()
        return value + 2

    CHILDREN.clear()
    assert [await call_in_daemon(hook, 1), await call_in_daemon(hook_later, 1)] == [2, 3]
    assert [os.waitpid(child, 0)[1] for child in CHILDREN] == [0, 0]
