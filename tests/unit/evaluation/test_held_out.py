"""The loss of held-out labels: what it is of, and how the trainer gets to measure it beside engines that rest."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest

from rlscale.config import BatchConfig
from rlscale.control.engine_sleep import resting
from rlscale.evaluation.sft_loss import HeldOutLoss, LabelledSet
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, Group, Prompt, Sample, SampleStatus, StepPlan, TrainBatch, WeightVersion


class Log(list[str]):
    """An engine and trainers that note what they are asked, in order."""

    address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")

    async def pause(self, mode: str = "retract") -> None:
        self.append("pause")

    async def resume(self) -> None:
        self.append("resume")

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        self.append("release " + " ".join(sorted(tags)))

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        self.append("take back " + " ".join(tags))

    async def sync_weights(self, version: WeightVersion) -> None:
        self.append(f"sync v{version}")

    async def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        self.append(f"loss of {batch.num_samples} in {len(steps)} steps")
        return float(batch.num_samples)


def labelled(num_prompts: int) -> LabelledSet:
    groups = []
    for i in range(num_prompts):
        prompt = Prompt(index=i, text=str(i), token_ids=(1, 2))
        sample = Sample(index=i, group_index=i, prompt=prompt, seed=0)
        sample.append([3], logprobs=[0.0], weight_versions=[0])
        sample.status = SampleStatus.completed
        groups.append(Group(index=i, prompt=prompt, samples=[sample]))
    config = BatchConfig(rollout_batch_size=2, n_samples_per_prompt=1, num_steps_per_rollout=1, global_batch_size=2)
    return LabelledSet.of(groups, config, num_ranks=1, context_ranks=1)


async def test_it_is_the_mean_over_the_sets() -> None:
    log = Log()
    held_out = HeldOutLoss({"a": labelled(2), "b": labelled(4)}, measure=log.loss)
    assert await held_out.run(7) == {"eval/a/loss": 2.0, "eval/b/loss": 4.0, "eval/loss": 3.0}
    assert log == ["loss of 2 in 1 steps", "loss of 4 in 2 steps"]


async def test_engines_rest_once_and_get_the_same_version_back() -> None:
    log: Any = Log()
    turn = partial(resting, EnginePool([log]), log)
    await HeldOutLoss({"a": labelled(2), "b": labelled(2)}, measure=log.loss, turn=turn).run(7)
    assert log[:2] == ["pause", "release kv_cache weights"]
    assert log[2:4] == ["loss of 2 in 1 steps"] * 2
    assert log[4:] == ["take back weights", "sync v7", "take back kv_cache", "resume"]


async def test_without_sets_no_engine_is_disturbed() -> None:
    log: Any = Log()
    assert await HeldOutLoss({}, measure=log.loss, turn=partial(resting, EnginePool([log]), log)).run(7) == {}
    assert log == []


async def test_a_failure_is_not_hidden_by_engines_that_come_back() -> None:
    log: Any = Log()

    async def fails(batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        await HeldOutLoss({"a": labelled(2)}, measure=fails, turn=partial(resting, EnginePool([log]), log)).run(7)
    assert "sync v7" not in log
