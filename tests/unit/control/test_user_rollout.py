"""Rollout and eval functions of users in the loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlscale.errors import HookError
from rlscale.plugins.slime_requests import post
from rlscale.plugins.user_hook import UserHook
from rlscale.types import Group
from tests.unit.control.simulation import NUM_PROMPTS, NUM_SAMPLES, simulation
from tests.unit.control.test_sampling import outcomes
from tests.unit.control.test_user_hooks import document, two_turns, wait_for_ever

KEY = "rollout.function_path"


def whole(function: Callable[..., Any], *, key: str = KEY, timeout_s: float = 30.0) -> UserHook:
    return UserHook(key=key, function=document(key, function), timeout_s=timeout_s)


async def every_second(rollout_id: int, context: Any) -> list[Group]:
    """Draws twice as many groups as it returns; puts one back."""
    drawn = context.draw(2 * context.num_groups)
    made = await asyncio.gather(*[context.generate(group) for group in drawn[::2]])
    context.requeue(drawn[1:2])
    context.metrics["mine/drawn"] = len(drawn)
    return list(made)


async def test_a_rollout_function_replaces_the_collection_and_every_group_has_an_outcome(tmp_path: Path) -> None:
    with simulation(tmp_path, num_rollouts=2, rollout_function=whole(every_second)) as run:
        await run.loop.run()
    # Group 1 was put back and comes first; 3 and 5 were dropped.
    assert run.trained_groups == [0, 2, 4, 1, 7, 9]
    found = outcomes(run.pages)
    dropped = {index // NUM_SAMPLES for index, outcome in found.items() if outcome == "dropped/rollout_function"}
    assert {3, 5} <= dropped and set(found.values()) == {"trained", "dropped/rollout_function"}
    assert run.sink.logged[0]["mine/drawn"] == 2 * NUM_PROMPTS


@dataclass
class Output:
    samples: list[Any]
    metrics: dict[str, Any] | None = None


def of_documents(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A plain function with an event loop inside, as in slime."""

    async def generate(sample: Any) -> Any:
        sample = await two_turns(args, sample, {"max_new_tokens": 8})
        sample.reward, sample.status = float(sample.index), sample.Status.COMPLETED
        return sample

    async def run() -> list[list[Any]]:
        groups = data_source.get_samples(args.rollout_batch_size)
        return [list(await asyncio.gather(*map(generate, group))) for group in groups]

    return Output(asyncio.run(run()), {"mine/of": rollout_id, "text": "x"})


async def test_a_rollout_function_in_slimes_form_makes_what_is_trained(tmp_path: Path) -> None:
    with simulation(tmp_path, num_rollouts=2, rollout_function=whole(of_documents)) as run:
        await run.loop.run()
    assert run.trained_groups == list(range(2 * NUM_PROMPTS))
    first, second = run.trainers.history
    assert second.rewards == [float(i) for i in range(NUM_PROMPTS * NUM_SAMPLES, 2 * NUM_PROMPTS * NUM_SAMPLES)]
    assert first.masks == [[1, 1, 1, 0, 0, 1, 1, 1]] * NUM_PROMPTS * NUM_SAMPLES
    assert {version for each in second.versions for version in each} == {1}
    assert run.sink.logged[1]["mine/of"] == 1.0 and set(outcomes(run.pages).values()) == {"trained"}


async def test_a_resumed_run_draws_the_prompts_of_the_unfinished_rollout_again(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_rollouts": 4, "save_interval": 1, "rollout_function": whole(of_documents)}
    with simulation(tmp_path, **values) as run:
        task = asyncio.create_task(run.loop.run())
        while len(run.trainers.history) < 2:
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start = run.store.latest()
    assert start is not None
    with simulation(tmp_path, start=start, **values) as again:
        await again.trainers.load(start.folder)
        await again.loop.run()
    assert again.trained_groups == list(range(4 * NUM_PROMPTS))


async def all_failed(rollout_id: int, context: Any) -> list[Group]:
    drawn: list[Group] = context.draw(context.num_groups)
    return drawn


async def two_rewards(rollout_id: int, context: Any) -> list[Group]:
    """Makes the second trajectory of each group a part of the first one, and keeps its reward."""
    made = [await context.generate(group) for group in context.draw(context.num_groups)]
    for group in made:
        first, second, *_ = group.samples
        second.index, second.path, second.reward = first.index, 1, first.reward + 1
    return made


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wait_for_ever, "rollout.function_path must return within"),
        (all_failed, "rollout.function_path must return at least one sample, got only failed ones in groups [0, 1, 2]"),
        (
            two_rewards,
            "rollout.function_path must give all samples of a trajectory one reward, got 1.0 and 2.0 of trajectory 0",
        ),
        (lambda rollout_id, context: context.draw(NUM_PROMPTS - 1), "must return 3 groups that it drew, each once"),
        (lambda rollout_id, context: None, "must return 3 groups that it drew, each once, got None"),
        (
            lambda args, rollout_id, data_source, evaluation=False: data_source.get_samples(NUM_PROMPTS),
            "must return the tokens of prompt and response",
        ),
    ],
)
async def test_a_wrong_rollout_function_ends_the_run(
    tmp_path: Path, function: Callable[..., Any], message: str
) -> None:
    hook = whole(function, timeout_s=0.5)
    with simulation(tmp_path, num_rollouts=1, rollout_function=hook) as run, pytest.raises(BaseExceptionGroup) as found:
        await run.loop.run()
    caught: BaseException | None = found.value.subgroup(HookError)
    while isinstance(caught, BaseExceptionGroup):
        caught = caught.exceptions[0]
    assert message in str(caught)


async def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": [1, 5], "sampling_params": {}})
    rewards = [float(token) for token in output["output_ids"]]
    return {"aime": {"rewards": rewards, "truncated": [False] * len(rewards), "samples": []}}


async def test_an_eval_function_replaces_the_evaluation(tmp_path: Path) -> None:
    hook = whole(evaluate, key="eval.function_path")
    with simulation(tmp_path, num_rollouts=2, eval_interval=1, eval_function=hook) as run:
        await run.loop.run()
    # A token of the simulated engine is the version of its weights.
    assert [run.sink.logged[step]["eval/aime/reward_mean"] for step in (0, 1)] == [1.0, 2.0]
    assert run.loop.progress.first_eval == 0.0 and run.loop.progress.last_eval == 2.0
