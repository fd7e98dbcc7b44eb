"""The rewards of a run: that of training, and those of evaluation sets with their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from rlscale.config import RewardConfig, prompts_name
from rlscale.driver.prepared_run import PreparedRun
from rlscale.rewards import JudgeSpec, PoolLimits, RewardRunner, RunReward, with_judge
from rlscale.types import EngineAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRewards:
    """Runners that score samples; each has its own processes, if its reward needs some."""

    training: RewardRunner
    sets: Mapping[str, RewardRunner] = field(default_factory=dict)  # of evaluation sets with their own reward

    def of_set(self, name: str) -> RewardRunner:
        """The runner of an evaluation set."""
        return self.sets.get(name, self.training)

    def set_judge_addresses(self, addresses: Sequence[EngineAddress], model: str | None = None) -> None:
        """Replaces the addresses of engines after one was restarted; `model` as in `JudgeClient.set_addresses`."""
        for runner in (self.training, *self.sets.values()):
            runner.set_judge_addresses(addresses, model)


@contextmanager
def open_rewards(prepared: PreparedRun, judge: JudgeSpec | None) -> Iterator[OpenRewards | None]:
    """Computes rewards, in processes where needed; None: the run generates nothing.

    Args:
        judge: engines that rewards may ask; None: the run has none.
    """
    if prepared.reward is None:
        yield None
        return
    config = prepared.config.reward
    source = prompts_name(prepared.config.data)
    with ExitStack() as stack:
        training = _runner(prepared.reward, config, judge=judge, source=source, weights=config.weights)
        sets = {
            each.name: _runner(each.reward, config, judge=judge, source=f"the evaluation set {each.name}")
            for each in prepared.eval_sets
            if each.reward is not None
        }
        for runner in (training, *sets.values()):
            stack.enter_context(runner)
        yield OpenRewards(training=training, sets=sets)


def reward_limits(config: RewardConfig) -> PoolLimits:
    """Limits of the processes of a reward."""
    return PoolLimits(
        max_workers=config.max_workers, max_concurrency=config.max_concurrency, timeout_s=config.timeout_s
    )


def _runner(
    reward: RunReward,
    config: RewardConfig,
    *,
    judge: JudgeSpec | None,
    source: str,
    weights: Mapping[str, float] | None = None,
) -> RewardRunner:
    return RewardRunner(
        reward if judge is None else with_judge(reward, judge),
        limits=reward_limits(config),
        max_retries=config.max_retries,
        weights=weights,
        source=source,
    )
