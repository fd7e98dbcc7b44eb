"""Source of rollouts that engines generate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlscale.config import BatchConfig, EvalConfig, RolloutConfig
from rlscale.protocols import PromptSource
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.group import generate_group
from rlscale.types import Group, Prompt, RouteShape, SampleStatus, SamplingParams, WeightVersion


class GeneratedRollouts:
    """Draws prompts, has each answered, and rewards a group as soon as it is complete.

    prompts ── next_prompts ──> generate_group ── samples ──> reward ──> group
                                (the engines queue)           (threads)

    `params`: see `sampling_params`.
    """

    has_rewards = True

    def __init__(
        self,
        *,
        prompts: PromptSource,
        pool: EnginePool,
        rewards: RewardRunner,
        params: SamplingParams,
        batch: BatchConfig,
        reward_key: str | None = None,
    ) -> None:
        self._prompts, self._pool, self._rewards, self._reward_key = prompts, pool, rewards, reward_key
        self._num_prompts, self._num_samples = batch.rollout_batch_size, batch.n_samples_per_prompt
        self._params = params

    def next_prompts(self, rollout_id: int) -> list[tuple[int, Prompt]]:
        """The next `batch.rollout_batch_size` prompts with the indices of their groups."""
        first = rollout_id * self._num_prompts
        return list(enumerate(self._prompts.take(self._num_prompts), start=first))

    async def group(self, index: int, prompt: Prompt, *, oldest: WeightVersion, newest: WeightVersion | None) -> Group:
        """The answers to one prompt, rewarded unless one of them was aborted.

        Raises:
            WeightSyncError: a token was made by weights outside [oldest, newest].
            RewardError: a reward failed; the message names the sample.
        """
        group = await generate_group(
            self._pool, prompt, self._params, index=index, n=self._num_samples, versions=(oldest, newest)
        )
        if all(sample.status != SampleStatus.aborted for sample in group.samples):
            await self._rewards.score(group, key=self._reward_key)
        return group

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])


def sampling_params(config: RolloutConfig, *, routes: RouteShape | None = None) -> SamplingParams:
    """Sampling of training rollouts. `sampling_seed` is the run's seed, from which every group derives its own.

    Args:
        routes: shape of the expert routes that answers include; None: no routes.
    """
    return SamplingParams(
        max_new_tokens=config.max_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=tuple(config.stop or ()),
        stop_token_ids=tuple(config.stop_token_ids or ()),
        skip_special_tokens=config.skip_special_tokens,
        sampling_seed=config.seed,
        routes=routes,
    )


def eval_params(config: EvalConfig, rollout: RolloutConfig) -> SamplingParams:
    """Sampling of evaluations; the resolve step has filled unset keys from the run's own sampling."""
    assert config.max_response_len is not None and config.temperature is not None
    assert config.top_p is not None and config.top_k is not None
    return replace(
        sampling_params(rollout),
        max_new_tokens=config.max_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_new_tokens=config.min_new_tokens or 0,
    )
