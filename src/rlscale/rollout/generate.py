"""The source of rollouts that engines generate."""

import asyncio
from dataclasses import replace
from collections.abc import Mapping
from typing import Any

from rlscale.config import EvalConfig, RolloutConfig
from rlscale.protocols import PromptSource
from rlscale.rewards import RewardRunner
from rlscale.rollout.groups import generate_group
from rlscale.rollout.pool import EnginePool
from rlscale.types import Group, Prompt, SamplingParams, WeightVersion


class GeneratedRollouts:
    """Takes prompts, has them answered and rewards each group as soon as it is complete.

    prompts ── take ──> generate_group ── samples ──> reward ──> groups, in the order of their prompts
                        (all at once; the engines queue)  (threads)
    """

    has_rewards = True

    def __init__(
        self,
        *,
        prompts: PromptSource,
        pool: EnginePool,
        rewards: RewardRunner,
        config: RolloutConfig,
        num_prompts: int,
        num_samples: int,
    ) -> None:
        self._prompts, self._pool, self._rewards = prompts, pool, rewards
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._max_staleness = config.max_staleness
        self._params = sampling_params(config)

    async def rollout(self, rollout_id: int, version: WeightVersion) -> list[Group]:
        """One group for each of the next prompts.

        Raises:
            WeightSyncError: a token was made by weights older than `rollout.max_staleness` allows.
            RewardError: a reward failed; the message names the sample.
        """
        first = rollout_id * self._num_prompts
        prompts = self._prompts.take(self._num_prompts)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._one(first + i, prompt, version)) for i, prompt in enumerate(prompts)]
        return [task.result() for task in running]

    async def _one(self, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        group = await generate_group(
            self._pool,
            prompt,
            self._params,
            index=index,
            n=self._num_samples,
            versions=(max(0, version - self._max_staleness), version),
        )
        await self._rewards.score(group)
        return group

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])

        min_p=config.min_p,
        stop=tuple(config.stop or ()),

        skip_special_tokens=config.skip_special_tokens,
def sampling_params(config: RolloutConfig) -> SamplingParams:
    """How training samples are drawn; `sampling_seed` is the run's seed, from which every group derives its own."""
    return replace(
        sampling_params(rollout),
        max_new_tokens=config.max_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=tuple(config.stop_token_ids or ()),
        sampling_seed=config.seed,
    )


def eval_params(config: EvalConfig, rollout: RolloutConfig) -> SamplingParams:
    """How evaluation samples are drawn; the resolve step has filled in what the run's own sampling gives."""
    assert config.max_response_len is not None and config.temperature is not None
    assert config.top_p is not None and config.top_k is not None
    return SamplingParams(
        max_new_tokens=config.max_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_new_tokens=config.min_new_tokens or 0,
    )
