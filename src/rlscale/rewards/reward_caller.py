"""Calls one reward, in place or in processes, and calls it again after a failure."""

import asyncio
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from rlscale.protocols import Reward
from rlscale.rewards.call_pool import PoolLimits
from rlscale.rewards.code_place import describe_exception
from rlscale.rewards.reward_pool import Outcome, RewardPool
from rlscale.rewards.reward_spec import RewardSpec
from rlscale.rewards.reward_value import GradingError, RewardValue, check_value
from rlscale.types import EngineAddress, Sample

MAX_BACKOFF_S = 30.0

Accept: TypeAlias = Callable[[Sample, RewardValue], GradingError | None]
"""Takes the value of a sample; returns why it cannot be used, or None."""


class RewardCaller:
    """One reward with its processes, deadline and retries.

        call(samples) ── spec of user code or a slow grader ──> RewardPool ──> values, or errors
                     └── pure and fast function of rlscale ──> called here ──┘      │
                                 ^────────────── same answer again, with back-off ──┘

    Args:
        reward: a `RewardSpec`, or a function that is called here. A function may not block.
        max_retries: further calls for a sample whose call failed.
        backoff_s: wait before the first of them; doubles each time.
        on_retry: called with an error of each call that is made again.

    Example:
        caller = RewardCaller(RewardSpec(config=config.reward), PoolLimits(), max_retries=2, backoff_s=0.5)
        errors = await caller.call([sample], accept=set_reward)
    """

    def __init__(
        self,
        reward: Reward | RewardSpec,
        limits: PoolLimits,
        *,
        max_retries: int,
        backoff_s: float,
        on_retry: Callable[[GradingError], None] = lambda _: None,
    ) -> None:
        self._function = None if isinstance(reward, RewardSpec) else reward
        self._pool = RewardPool(reward, limits) if isinstance(reward, RewardSpec) else None
        # A function of rlscale returns the same for the same answer.
        self._max_retries = max_retries if self._pool is not None else 0
        self._backoff_s, self._on_retry = backoff_s, on_retry

    @property
    def is_in_place(self) -> bool:
        """Whether calls run here, one at a time."""
        return self._pool is None

    async def call(self, samples: Sequence[Sample], *, accept: Accept) -> dict[int, GradingError]:
        """Scores the samples of one call; all of them are scored again if one fails.

        Returns:
            Errors of the last attempt by position.
        """
        errors: dict[int, GradingError] = {}
        for attempt in range(self._max_retries + 1):
            if attempt:
                await asyncio.sleep(min(MAX_BACKOFF_S, self._backoff_s * 2 ** min(attempt - 1, 64)))
            outcomes = await (self._call_here(samples[0]) if self._pool is None else self._pool.call(samples))
            errors = {
                i: error
                for i, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True))
                if (error := outcome if isinstance(outcome, GradingError) else accept(sample, outcome)) is not None
            }
            if not errors:
                break
            if attempt < self._max_retries:
                self._on_retry(next(iter(errors.values())))
        return errors

    def set_judge_addresses(self, addresses: Sequence[EngineAddress], model: str | None = None) -> None:
        """Replaces the addresses of engines; `model` as in `JudgeClient.set_addresses`."""
        if self._pool is not None:
            self._pool.set_judge_addresses(addresses, model)

    def close(self, *, wait: bool) -> None:
        """Ends the processes, at once if not `wait`."""
        if self._pool is not None:
            self._pool.close(wait=wait)

    async def _call_here(self, sample: Sample) -> list[Outcome]:
        """Calls a function of rlscale."""
        assert self._function is not None, "a reward without a function has a pool"
        try:
            value: Any = self._function(sample)
            return [check_value(await value if isawaitable(value) else value)]
        except Exception as error:  # any type: becomes a value with its message
            if type(error) is ValueError and str(error).startswith("must be a finite number"):
                return [GradingError(cause=str(error))]
            cause, place, text = describe_exception(error)
            return [GradingError(cause=cause, place=place, traceback=text)]
