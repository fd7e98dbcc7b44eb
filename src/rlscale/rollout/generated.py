"""Source of rollouts that engines generate."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlscale.config import EvalConfig, RolloutConfig, RunConfig
from rlscale.expert_routes import RouteShape
from rlscale.protocols import CollectSettings, PromptSource
from rlscale.rollout.draw_prompts import draw_prompts
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.grading import Scorer
from rlscale.rollout.group_age import max_lag
from rlscale.rollout.group_filters import TOO_FEW, GroupFilters
from rlscale.rollout.group_generator import Generate, GroupGenerator, GroupSettings
from rlscale.rollout.prompt_schedule import PromptSchedule
from rlscale.rollout.teacher_grading import TeacherGrading
from rlscale.types import Group, Prompt, SamplingParams, WeightVersion


class GeneratedRollouts:
    """Draws prompts, has each answered, and rewards a group as soon as it is complete.

    prompts ── next_prompts ──> GroupGenerator ──> reward ──> reason_to_drop ──> group
                                (the engines queue)
    """

    has_rewards = True

    def __init__(
        self,
        *,
        prompts: PromptSource,
        sessions: SessionFactory,
        rewards: Scorer,
        config: RunConfig,
        filters: GroupFilters | None = None,
        generate: Generate | None = None,
    ) -> None:
        sampling, batch = config.sampling, config.batch
        self._prompts, self._schedule = prompts, PromptSchedule(prompts, sampling, seed=config.rollout.seed)
        self._sessions, self._filters = sessions, filters or GroupFilters()
        self._num_samples = batch.n_samples_per_prompt
        # A group of one prompt's only sample is complete.
        self._min_samples = min(sampling.min_group_size, self._num_samples)
        self._next_index, self._draw_timeout_s = 0, sampling.hook_timeout_s
        self._last_rollout = -1  # that has drawn prompts
        # A rollout function of the user gets whole groups.
        in_rounds = sampling.partial_rollout and config.rollout.function_path is None
        round_tokens = sampling.round_tokens if in_rounds else None
        self._generator = GroupGenerator(
            sessions,
            rewards,
            GroupSettings(
                num_samples=self._num_samples,
                reward_key=config.reward.key,
                max_retries=sampling.max_retries,
                max_versions=sampling.max_weight_versions if sampling.partial_rollout else None,
                mask_off_policy=sampling.mask_offpolicy_in_partial_rollout,
                round_tokens=round_tokens,
                generate=generate,
            ),
        )
        self.max_lag = max_lag(sampling)
        self.settings = CollectSettings(
            num_groups=batch.rollout_batch_size,
            wave=sampling.over_sampling_batch_size or batch.rollout_batch_size,
            takes_first_finished=sampling.partial_rollout,
            in_rounds=round_tokens is not None,
            is_filled=self._filters.fills_rollouts,
            keeps_dropped=sampling.all_samples_process_path is not None,
            repeats=not sampling.partial_rollout and config.rollout.max_staleness == 0,
        )

    def set_teachers(self, teachers: TeacherGrading | None) -> None:
        """Sets the teachers whose logprobs samples get; None: no distillation from a server."""
        self._generator.teachers = teachers

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """The next prompts with the indices of their groups, which count over the run. None: a whole rollout."""
        assert self.settings.num_groups is not None, "a generated rollout has a fixed number of groups"
        number = self.settings.num_groups if number is None else number
        first, self._next_index = self._next_index, self._next_index + number
        starts, self._last_rollout = rollout_id > self._last_rollout, max(rollout_id, self._last_rollout)
        return list(enumerate(self._schedule.take(number, starts_rollout=starts), start=first)) if number else []

    async def draw(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """See RolloutSource."""
        return await draw_prompts(self, self._prompts, rollout_id, number, timeout_s=self._draw_timeout_s)

    def trajectory_ids(self, index: int) -> Sequence[int]:
        """The ids of a group's trajectories, which count over the run."""
        return range(index * self._num_samples, (index + 1) * self._num_samples)

    async def group(
        self,
        index: int,
        prompt: Prompt,
        *,
        oldest: WeightVersion,
        newest: WeightVersion | None,
        before: Group | None = None,
    ) -> Group:
        """See RolloutSource.

        Raises:
            WeightSyncError: a token was made by weights outside [oldest, newest].
            RewardError: the reward never worked.
        """
        return await self._generator.run(index, prompt, versions=(oldest, newest), before=before)

    def reason_to_drop(self, group: Group) -> str | Awaitable[str | None] | None:
        """`min_group_size`, or the reason of the dynamic filter."""
        if len({sample.index for sample in group.samples}) < self._min_samples:
            return TOO_FEW
        return self._filters.reason_to_drop(group)

    async def choose_buffered(self, groups: Sequence[Group], number: int) -> list[int]:
        """The first groups of the buffer, or those that the buffer filter selects."""
        return await self._filters.choose(groups, number)

    def observe_dropped(self, group: Group, *, rollout_id: int) -> None:
        """See RolloutSource."""
        self._schedule.observe_dropped(group, rollout_id=rollout_id)

    def observe(self, groups: Sequence[Group], *, rollout_id: int) -> None:
        """See RolloutSource."""
        self._schedule.observe(groups, rollout_id=rollout_id)

    async def stop(self, indices: Sequence[int]) -> None:
        """See RolloutSource."""
        await self._sessions.stop(indices)

    def state_dict(self) -> dict[str, Any]:
        state = {"prompts": self._prompts.state_dict(), "next_index": self._next_index}
        schedule = self._schedule.state_dict()
        return {**state, "schedule": schedule} if schedule else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        if "schedule" in state:  # absent where the run had none of its settings
            self._schedule.load_state_dict(state["schedule"])
        self._next_index = state["next_index"]


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
        max_context_len=config.max_context_len,
    ).with_values(config.sampling_params)


def eval_params(config: EvalConfig, rollout: RolloutConfig) -> SamplingParams:
    """Sampling of evaluations; the resolve step has filled unset keys from the run's own sampling."""
    assert config.max_response_len is not None and config.temperature is not None
    assert config.top_p is not None and config.top_k is not None
    params = sampling_params(rollout)
    return replace(
        params,
        max_new_tokens=config.max_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_new_tokens=params.min_new_tokens if config.min_new_tokens is None else config.min_new_tokens,
    )
