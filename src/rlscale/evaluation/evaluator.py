"""Rewards on held-out prompts, with the weights that the engines hold now."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlscale.evaluation.named_rewards import named_rewards
from rlscale.evaluation.pass_at_k import pass_at_k
from rlscale.evaluation.sft_loss import HeldOutLoss
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.group import generate_group
from rlscale.types import Group, Prompt, SamplingParams, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """Held-out prompts under a name that metrics carry, and how they are answered and scored."""

    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    num_samples: int = 1
    reward_key: str | None = None  # as `reward.key`


class Evaluator:
    """Answers every prompt of every set and reports means.

    The seeds depend on the row alone, so two evaluations of the same weights give the same numbers. `held_out`: what
    the trainer measures beside it.
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
            groups = await self._answer(eval_set, version)
            metrics |= {f"eval/{eval_set.name}/{key}": value for key, value in _measure(groups).items()}
        metrics["eval/reward_mean"] = fmean(metrics[f"eval/{s.name}/reward_mean"] for s in self._sets)
        return metrics | (await self._held_out.run(version) if self._held_out is not None else {})

    async def _answer(self, eval_set: EvalSet, version: WeightVersion) -> list[Group]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._one(eval_set, i, prompt, version)) for i, prompt in enumerate(eval_set.prompts)
            ]
        return [task.result() for task in running]

    async def _one(self, eval_set: EvalSet, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        group = await generate_group(
            self._pool,
            prompt,
            eval_set.params,
            index=index,
            n=eval_set.num_samples,
            versions=(version, version),
            purpose=f"eval-{eval_set.name}",
        )
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
    num_samples = len(groups[0].samples)
    k = 2
    while k <= num_samples:
        measured[f"pass@{k}"] = fmean(
            pass_at_k(num_samples, sum(s.reward == 1.0 for s in group.samples), k) for group in groups
        )
        k *= 2
    return measured | named_rewards(samples)
