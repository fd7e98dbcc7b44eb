"""Rewards of a batch that a function of the user has changed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlscale.config import BatchConfig, RunConfig
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.data.batch import build_batch
from rlscale.errors import HookError
from rlscale.plugins.args_view import Args
from rlscale.plugins.batch_conversion import DocumentBatchConversion
from rlscale.plugins.user_hook import UserHook
from rlscale.types import REWARD_WEIGHTS, REWARDS, Group, Prompt, Sample, SampleStatus, TrainBatch

Convert = Callable[[Sequence[Group], TrainBatch], TrainBatch]

PROMPT = Prompt(index=0, text="", token_ids=(1,))
KEY = "train.convert_samples_path"


def group(*, last: int) -> Group:
    """Three samples with two named rewards each; the last one is of trajectory `last`."""
    samples = []
    for index, right in ((0, 1.0), (1, 0.0), (last, 0.0)):
        sample = Sample(index=index, group_index=0, prompt=PROMPT, seed=0, status=SampleStatus.completed, reward=right)
        sample.append([5, 6], logprobs=[0.0, 0.0], weight_versions=[0, 0])
        sample.metadata = {REWARDS: {"right": right, "short": 0.0}, REWARD_WEIGHTS: {"right": 1.0, "short": 1.0}}
        samples.append(sample)
    return Group(index=0, prompt=PROMPT, samples=samples)


def form_of_slime(rewards: list[float]) -> DocumentBatchConversion:
    args = Args(RunConfig(batch=BatchConfig(rollout_batch_size=1)))
    return DocumentBatchConversion(lambda args, samples: {"rewards": rewards}, args)


async def converted(convert: Convert, given: Group) -> TrainBatch:
    hooks = RolloutHooks(convert=UserHook(key=KEY, function=convert, timeout_s=30.0))
    return await hooks.converted([given], build_batch([given], version=0))


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0], [1.0, 0.0, 0.5]])
async def test_other_rewards_have_no_names(rewards: list[float]) -> None:
    # gdpo reads the named rewards where there are any: those before would hide the ones that are to be trained.
    own: Convert = lambda groups, batch: replace(batch, rewards=np.array(rewards, np.float32))  # noqa: E731
    for convert in (own, form_of_slime(rewards)):
        batch = await converted(convert, group(last=2))
        assert batch.rewards.tolist() == rewards
        is_changed = rewards[2] != 0.0
        assert (batch.named_rewards is None) == is_changed
        assert (
            (batch.reward_names, batch.reward_weights) == ((), ()) if is_changed else (("right", "short"), (1.0, 1.0))
        )


async def test_a_conversion_may_give_other_named_rewards() -> None:
    def double(groups: Sequence[Group], batch: TrainBatch) -> TrainBatch:
        named: Any = batch.named_rewards
        return replace(batch, rewards=2 * batch.rewards, named_rewards=2 * named)

    batch = await converted(double, group(last=2))
    assert batch.named_rewards is not None and batch.named_rewards[:, 0].tolist() == [2.0, 0.0, 0.0]


async def test_samples_of_one_trajectory_have_one_reward() -> None:
    message = rf"{KEY} must .* got different rewards of the samples of one trajectory"
    with pytest.raises(HookError, match=message):
        await converted(form_of_slime([1.0, 0.0, 0.5]), group(last=1))
    assert (await converted(form_of_slime([1.0, 0.5, 0.5]), group(last=1))).rewards.tolist() == [1.0, 0.5, 0.5]
