"""Rewards on held-out prompts, with the weights that the engines hold now."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlscale.evaluation.sft_loss import HeldOutLoss
from rlscale.observe.metrics.named_rewards import named_rewards
from rlscale.observe.metrics.pass_at_k import pass_rates
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.group import generate_group
from rlscale.types import Group, Prompt, SamplingParams, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """Held-out prompts with the name that metrics use, their sampling and their reward."""

    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    num_samples: int = 1
    reward_key: str | None = None  # as `reward.key`


class Evaluator:
    """Has every prompt of every set answered, and returns means.

    Seeds depend on the row alone, so that two evaluations of the same weights return the same numbers.

    Args:
        held_out: loss that the trainer measures in addition; None: rewards only.
    """

    def __init__(
        self,
        *,
        sets: Sequence[EvalSet],
        pool: EnginePool,
        rewards: RewardRunner,
        held_out: HeldOutLoss | None = None,
    ) -> None:
        self._sets, self._pool, self._rewards, self._held_out = sets, pool, rewards, held_out

    async def run(self, version: WeightVersion) -> dict[str, float]:
        """`eval/<set>/...` for every set, and `eval/reward_mean`, the mean over the sets."""
        metrics: dict[str, float] = {}
        for eval_set in self._sets:
            groups = await self._generate(eval_set, version)
            metrics |= {f"eval/{eval_set.name}/{key}": value for key, value in _measure(groups).items()}
        metrics["eval/reward_mean"] = fmean(metrics[f"eval/{s.name}/reward_mean"] for s in self._sets)
        return metrics | (await self._held_out.run(version) if self._held_out is not None else {})

    async def _generate(self, eval_set: EvalSet, version: WeightVersion) -> list[Group]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._generate_group(eval_set, i, prompt, version))
                for i, prompt in enumerate(eval_set.prompts)
            ]
        return [task.result() for task in running]

    async def _generate_group(self, eval_set: EvalSet, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        group = await generate_group(
            self._pool,
            prompt,
            eval_set.params,
            index=index,
            n=eval_set.num_samples,
            versions=(version, version),
            purpose=f"eval-{eval_set.name}",
        )
        # Scored at once, while other prompts are still generated.
        await self._rewards.score(group, key=eval_set.reward_key)
        return group


def _measure(groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    assert len(rewards) == len(samples), "every evaluated sample is rewarded"
    measured = {
        "reward_mean": fmean(rewards),
        "response_len_mean": fmean(sample.response_len for sample in samples),
        "num_prompts": float(len(groups)),
    }
    # pass@1 is reward_mean for rewards of 0 and 1, so that k starts at 2.
    return measured | pass_rates(groups, first_k=2) | named_rewards(samples)
