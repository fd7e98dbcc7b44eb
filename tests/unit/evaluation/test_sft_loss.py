"""Loss of held-out labels, measured alone or while engines release their memory."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig
from rlscale.control.engine_sleep import released_engines
from rlscale.evaluation.sft_loss import HeldOutLoss, LabelledSet
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, Group, Prompt, Sample, SampleStatus, StepPlan, TrainBatch, WeightVersion


class Log(list[str]):
    """An engine and trainers that record their calls."""

    address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")

    async def pause(self, mode: str = "retract") -> None:
        self.append("pause")

    async def resume(self) -> None:
        self.append("resume")

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        self.append("release " + " ".join(sorted(tags)))

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        self.append("resume " + " ".join(tags))

    async def sync_weights(self, version: WeightVersion) -> None:
        self.append(f"sync v{version}")

    async def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        self.append(f"loss of {batch.num_samples} in {len(steps)} steps")
        return float(batch.num_samples)


def labelled(num_prompts: int, *, cost: ForwardCost | None = None) -> LabelledSet:
    groups = []
    for i in range(num_prompts):
        prompt = Prompt(index=i, text=str(i), token_ids=(1, 2))
        sample = Sample(index=i, group_index=i, prompt=prompt, seed=0)
        sample.append([3], logprobs=[0.0], weight_versions=[0])
        sample.status = SampleStatus.completed
        groups.append(Group(index=i, prompt=prompt, samples=[sample]))
    config = BatchConfig(
        rollout_batch_size=2,
        n_samples_per_prompt=1,
        num_steps_per_rollout=1,
        global_batch_size=2,
        balance_data=cost is not None,
    )
    return LabelledSet.from_groups(groups, config, num_ranks=1, context_ranks=1, cost=cost)


async def test_the_loss_is_the_mean_over_the_sets() -> None:
    log = Log()
    held_out = HeldOutLoss({"a": labelled(2), "b": labelled(4)}, compute=log.eval_loss)
    assert await held_out.run(7) == {"eval/a/loss": 2.0, "eval/b/loss": 4.0, "eval/loss": 3.0}
    assert log == ["loss of 2 in 1 steps", "loss of 4 in 2 steps"]


def test_balanced_labels_are_planned_with_the_cost_of_the_model() -> None:
    cost = ForwardCost(per_token=24, per_pair=2, per_logit_row=4)
    assert labelled(4, cost=cost).steps == labelled(4).steps  # one rank, samples of one length


async def test_engines_release_once_and_get_the_same_version_again() -> None:
    log: Any = Log()
    scope = partial(released_engines, EnginePool([log]), log)
    await HeldOutLoss({"a": labelled(2), "b": labelled(2)}, compute=log.eval_loss, scope=scope).run(7)
    assert log[:2] == ["pause", "release kv_cache weights"]
    assert log[2:4] == ["loss of 2 in 1 steps"] * 2
    assert log[4:] == ["resume weights", "sync v7", "resume kv_cache", "resume"]


async def test_without_sets_no_engine_is_disturbed() -> None:
    log: Any = Log()
    assert (
        await HeldOutLoss({}, compute=log.eval_loss, scope=partial(released_engines, EnginePool([log]), log)).run(7)
        == {}
    )
    assert log == []


async def test_a_failure_is_not_hidden_by_the_resume_of_engines() -> None:
    log: Any = Log()

    async def fails(batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        await HeldOutLoss(
            {"a": labelled(2)}, compute=fails, scope=partial(released_engines, EnginePool([log]), log)
        ).run(7)
    assert "sync v7" not in log
