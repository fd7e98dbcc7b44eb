"""The time limits of user functions and the built-in filters, from the keys of a config to the call."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlscale.config import load_config
from rlscale.driver.open_generate import Generators
from rlscale.driver.open_rewards import OpenRewards
from rlscale.driver.prepared_run import PreparedRun
from rlscale.driver.wiring import build_hooks, build_source, build_timelines, build_user_rollout
from rlscale.errors import HookError
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_process import ProcessGenerate
from rlscale.rollout.user_generate import UserGenerate
from tests.unit.control.simulation import Prompts, SimulatedEngine
from tests.unit.rollout.test_timeline import group_of

MODULE = """
import asyncio
import threading


async def generate(trajectory, session):
    await asyncio.sleep(5)


def hang(*arguments):
    threading.Event().wait(5)


async def rollout(rollout_id, context):
    threading.Event().wait(5)
"""

LIMITS = ("sampling.generate_timeout_s=0.11", "sampling.hook_timeout_s=0.12", "rollout.function_timeout_s=0.13")


@pytest.fixture
def pool() -> EnginePool:
    return EnginePool(list[Any]([SimulatedEngine()]))


def prepared(folder: Path, *overrides: str) -> PreparedRun:
    """The parts of a prepared run that the wiring reads."""
    (folder / "user_code_of_wiring.py").write_text(MODULE)
    config = load_config(
        [
            *("experiment=quickstart", "sampling.max_retries=0", "batch.n_samples_per_prompt=2", *LIMITS),
            *overrides,
        ]
    )
    found = SimpleNamespace(
        config=config,
        model_path="m",
        tokenizer=None,
        vocab_size=8,
        routes=None,
        prompts=Prompts(),
        sft=None,
        replay=None,
    )
    return cast(PreparedRun, found)


@pytest.mark.parametrize(("number", "num_groups"), [(0, 0), (4, 2)])
def test_timelines_keep_as_many_trajectories_as_the_key_says(tmp_path: Path, number: int, num_groups: int) -> None:
    timelines = build_timelines(prepared(tmp_path, f"logging.num_timelines={number}"))
    assert timelines is not None
    for index in range(6):
        timelines.open([2 * index, 2 * index + 1])
        timelines.close(group_of(index), "trained")
    assert len(timelines.close_page().groups) == num_groups


@pytest.mark.parametrize(("estimator", "reason"), [("gdpo", None), ("grpo", "equal_rewards")])
@pytest.mark.parametrize("fallback", ["", "_with_fallback"])
def test_the_filter_of_gdpo_compares_each_named_reward(
    tmp_path: Path, pool: EnginePool, fallback: str, estimator: str, reason: str | None
) -> None:
    filter_path = f"sampling.dynamic_filter_path=rlscale.rollout.group_filters:reward_std{fallback}"
    run = prepared(tmp_path, filter_path, f"algo.advantage_estimator={estimator}")
    group = group_of(0)
    # The sums are equal, and both estimators get them; gdpo normalises the two columns separately.
    for sample, names in zip(group.samples, ({"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}), strict=True):
        sample.reward, sample.metadata["rewards"] = 1.0, names
        sample.metadata["reward_weights"] = {"right": 1.0, "short": 1.0}
    with RewardRunner(lambda sample: 1.0) as rewards:
        source = build_source(run, pool, OpenRewards(training=rewards), folder=tmp_path, generators=Generators(run))
    assert source.reason_to_drop(group) == reason
    assert source.settings.is_filled == bool(fallback)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_a_generate_function_has_its_limit(tmp_path: Path, pool: EnginePool) -> None:
    thread = "sampling.generate_isolation=thread"
    run = prepared(tmp_path, "sampling.custom_generate_function_path=user_code_of_wiring:generate", thread)
    with RewardRunner(lambda sample: 1.0) as rewards:
        source = build_source(run, pool, OpenRewards(training=rewards), folder=tmp_path, generators=Generators(run))
        ((index, prompt),) = await source.draw(0, 1)
        group = await source.group(index, prompt, oldest=0, newest=0)
    messages = [failed.failure.message for failed in group.failed if failed.failure is not None]
    assert len(messages) == 2 and all("took longer than sampling.generate_timeout_s=0.11" in each for each in messages)


def test_generate_functions_are_opened_once_for_each_path_in_the_place_of_their_key(tmp_path: Path) -> None:
    path = "sampling.custom_generate_function_path=user_code_of_wiring:generate"
    keys = ("sampling.generate_processes=3", "sampling.generate_max_turns=7")
    generators = Generators(prepared(tmp_path, path, *keys))
    found = generators.find()
    assert isinstance(found, ProcessGenerate) and found.max_turns == 7
    assert found.limits.max_async_workers == 3 and found.limits.timeout_s == 0.11
    assert generators.find("user_code_of_wiring:generate") is found
    assert generators.find("user_code_of_wiring:rollout") is not found
    generators.close()
    assert isinstance(Generators(prepared(tmp_path, path, "sampling.generate_isolation=thread")).find(), UserGenerate)
    assert Generators(prepared(tmp_path)).find() is None
    assert Generators(prepared(tmp_path), agent=found).find() is found


@pytest.mark.slow
async def test_filters_and_hooks_have_their_limit(tmp_path: Path, pool: EnginePool) -> None:
    path = "user_code_of_wiring:hang"
    run = prepared(tmp_path, f"sampling.dynamic_filter_path={path}", f"sampling.sample_filter_path={path}")
    message = r"must return within sampling\.hook_timeout_s=0\.12"
    with pytest.raises(HookError, match=rf"sampling\.sample_filter_path {message}"):
        await build_hooks(run).finish([], [])
    with RewardRunner(lambda sample: 1.0) as rewards:
        source = build_source(run, pool, OpenRewards(training=rewards), folder=tmp_path)
        ((index, prompt),) = await source.draw(0, 1)
        group = await source.group(index, prompt, oldest=0, newest=0)
        verdict = source.reason_to_drop(group)
        assert verdict is not None and not isinstance(verdict, str)
        with pytest.raises(HookError, match=rf"sampling\.dynamic_filter_path {message}"):
            await verdict


async def test_a_rollout_function_has_its_limit(tmp_path: Path, pool: EnginePool) -> None:
    run = prepared(tmp_path, "rollout.function_path=user_code_of_wiring:rollout")
    user = build_user_rollout(run, pool)
    assert user is not None
    with pytest.raises(HookError, match=r"rollout\.function_path must return within rollout\.function_timeout_s=0\.13"):
        await user.hook(0, None)
