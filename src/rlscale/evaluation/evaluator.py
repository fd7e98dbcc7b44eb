"""Rewards on held-out prompts, with the weights that the engines hold now.

Trajectories that failed are retried as in training. Those that fail again leave the means, and are counted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlscale.config import RunConfig
from rlscale.evaluation.sft_loss import HeldOutLoss
from rlscale.observe.metrics.named_rewards import named_rewards
from rlscale.observe.metrics.pass_at_k import pass_rates
from rlscale.rewards import RewardRunner
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.group_generator import Generate, GroupGenerator, GroupSettings
from rlscale.types import Group, Prompt, SamplingParams, WeightVersion

EvalLog = Callable[[WeightVersion, Mapping[str, Sequence[Group]], dict[str, float]], Awaitable[dict[str, float]]]


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
        sessions: makes the requests of a set.
        held_out: loss that the trainer measures in addition; None: rewards only.
        generate: of the user, as in training; None: one request for each sample.
    """

    def __init__(
        self,
        *,
        sets: Sequence[EvalSet],
        sessions: Callable[[EvalSet], SessionFactory],
        rewards: RewardRunner,
        config: RunConfig,
        held_out: HeldOutLoss | None = None,
        generate: Generate | None = None,
    ) -> None:
        self._log: EvalLog | None = None
        self._held_out, self._max_failed_share = held_out, config.sampling.max_failed_share
        self._sets = [
            (
                each,
                GroupGenerator(
                    sessions(each),
                    rewards,
                    GroupSettings(
                        num_samples=each.num_samples,
                        reward_key=each.reward_key,
                        max_retries=config.sampling.max_retries,
                        generate=generate,
                        source=f"the evaluation set {each.name}",
                    ),
                ),
            )
            for each in sets
        ]

    def set_log(self, log: EvalLog) -> None:
        """Calls the user's log function, which returns the metrics of rewards that are logged."""
        self._log = log

    async def run(self, version: WeightVersion) -> dict[str, float]:
        """`eval/<set>/...` for every set, and `eval/reward_mean`, the mean over the sets.

        Raises:
            FailureShareError: more than `sampling.max_failed_share` of a set failed.
        """
        metrics: dict[str, float] = {}
        by_set: dict[str, list[Group]] = {}
        for eval_set, generator in self._sets:
            groups = by_set[eval_set.name] = await self._generate(eval_set, generator, version)
            metrics |= {f"eval/{eval_set.name}/{key}": value for key, value in _measure(groups).items()}
        metrics["eval/reward_mean"] = fmean(metrics[f"eval/{each.name}/reward_mean"] for each, _ in self._sets)
        if self._log is not None:
            metrics = await self._log(version, by_set, metrics)
        return metrics | (await self._held_out.run(version) if self._held_out is not None else {})

    async def _generate(self, eval_set: EvalSet, generator: GroupGenerator, version: WeightVersion) -> list[Group]:
        total = len(eval_set.prompts) * eval_set.num_samples
        # A set without any reward has no mean, whatever the limit.
        limit = min(self._max_failed_share, (total - 1) / total)
        watch = FailureWatch(max_share=limit, least=total, where=f"the evaluation set {eval_set.name}")

        async def generate(index: int, prompt: Prompt) -> Group:
            group = await generator.run(index, prompt, versions=(version, version))
            watch.add(group)
            return group

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(generate(i, prompt)) for i, prompt in enumerate(eval_set.prompts)]
        return [task.result() for task in running]


def _measure(groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    # A trajectory counts once, however many samples it has; its reward is that of its last sample.
    last = {sample.index: sample for sample in samples}
    rewards = [sample.reward for sample in last.values() if sample.reward is not None]
    assert len(rewards) == len(last), "every evaluated trajectory is rewarded"
    num_failed = len({sample.index for group in groups for sample in group.failed})
    measured = {
        "reward_mean": fmean(rewards),
        "response_len_mean": fmean(sample.response_len for sample in samples),
        "num_prompts": float(len(groups)),
    }
    if num_failed:
        measured["failed_share"] = num_failed / (num_failed + len(rewards))
    # pass@1 is reward_mean for rewards of 0 and 1, so that k starts at 2.
    return measured | pass_rates(groups, first_k=2) | named_rewards(list(last.values()))
