"""Scores samples outside of the event loop that drives the run, and returns failures as values."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from rlscale.errors import RewardError
from rlscale.rewards.call_pool import PoolLimits
from rlscale.rewards.reward_caller import RewardCaller
from rlscale.rewards.reward_spec import RewardFunctions, RewardSpec, RunReward
from rlscale.rewards.reward_value import GradingError, RewardValue, find_wrong_value, name_values, select_value
from rlscale.rewards.waiting_rewards import WaitingRewards
from rlscale.types import EngineAddress, Failure, FailureCause, Sample

MAX_FIRST_FAILURES = 32
"""Samples at the start of a run that all fail before the run stops."""

MAX_SHOWN_CHARS = 60
MAX_WARNINGS = 5
"""Failures that are logged as warnings; later ones at the level info."""

ONLY = ""
"""Name of the reward of a run without `reward.functions`."""

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class UserTraceback(Exception):
    """Traceback of user code in another process, as text: the cause of a RewardError."""


class RewardRunner:
    """Sets the reward of samples; a reward of the user runs in processes and can neither stop nor delay the run.

        score(samples) ──> one RewardCaller for each function ──> values by name ──> sum by weights ──> Sample.reward

    Args:
        reward: see `RunReward`. A function may not block.
        max_retries: further calls for a sample whose call failed.
        backoff_s: wait before the first of them; doubles each time.
        weights: of numbers by name, as `reward.weights`.
        source: name of the prompts in messages, e.g. their file.

    Example:
        with RewardRunner(RewardSpec(config=config.reward)) as rewards:
            failures = await rewards.score(group.samples)
    """

    def __init__(
        self,
        reward: RunReward,
        *,
        limits: PoolLimits | None = None,
        max_retries: int = 2,
        backoff_s: float = 0.5,
        weights: Mapping[str, float] | None = None,
        source: str = "the prompts",
    ) -> None:
        named = reward.functions if isinstance(reward, RewardFunctions) else {ONLY: reward}
        self._callers = {
            name: RewardCaller(
                each,
                limits or PoolLimits(),
                max_retries=max_retries,
                backoff_s=backoff_s,
                on_retry=lambda error: self._waiting.note_retry(_as_clause(error)),
            )
            for name, each in named.items()
        }
        self._is_group = isinstance(reward, RewardSpec) and reward.config.group
        self._source, self._weights = source, weights or {}
        self._waiting = WaitingRewards()
        self._num_scored = self._num_failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def close(self, *, wait: bool) -> None:
        """Ends the processes, at once if not `wait`; never waits for a call of user code."""
        self._waiting.stop()
        for caller in self._callers.values():
            caller.close(wait=wait)

    def set_judge_addresses(self, addresses: Sequence[EngineAddress], model: str | None = None) -> None:
        """Replaces the addresses of engines after one was restarted; `model` as in `JudgeClient.set_addresses`."""
        for caller in self._callers.values():
            caller.set_judge_addresses(addresses, model)

    async def score(
        self,
        samples: Sequence[Sample],
        *,
        key: str | None = None,
        source: str | None = None,
        on_scored: Callable[[Sequence[Sample]], None] | None = None,
    ) -> dict[int, Failure]:
        """Sets `reward` of every sample that can be scored.

        Args:
            samples: the samples of one group, for a reward of groups.
            key: the number to use of a reward that returns several by name; all of them are stored in the sample's
                metadata as `rewards`. None: the reward returns one number.
            source: as above, of these samples.
            on_scored: called with each part of the samples when it is graded, or has failed.

        Returns:
            Why the other samples have no reward, by `Sample.index`.

        Raises:
            RewardError: the first 32 samples of the run have failed.
        """
        units = [list(samples)] if self._is_group else [[sample] for sample in samples]

        async def score_unit(unit: list[Sample]) -> dict[int, Failure]:
            failures = await self._score_unit(unit, key, source)
            if on_scored is not None:
                on_scored(unit)
            return failures

        async def wait_for_unit(unit: list[Sample]) -> dict[int, Failure]:
            with self._waiting.add(unit):
                return await score_unit(unit)

        if all(caller.is_in_place for caller in self._callers.values()):
            scored = [await score_unit(unit) for unit in units]  # no task waits: calls are made one after another
        else:
            scored = await gather_or_cancel([wait_for_unit(unit) for unit in units])
        return {index: failure for failures in scored for index, failure in failures.items()}

    async def _score_unit(self, samples: list[Sample], key: str | None, source: str | None) -> dict[int, Failure]:
        """Scores the samples of one call by the only reward, or one sample by each of several."""
        if ONLY in self._callers:
            accept = partial(_set_reward, key=key, weights=self._weights)
            errors = await self._callers[ONLY].call(samples, accept=accept)
        else:
            errors = await self._score_by_all(samples[0], key)
        self._num_scored += len(samples) - len(errors)
        return {samples[i].index: self._fail(samples[i], error, source) for i, error in errors.items()}

    async def _score_by_all(self, sample: Sample, key: str | None) -> dict[int, GradingError]:
        """Sets the reward of a sample from the values of all functions; the error of one is that of the sample."""
        values: dict[str, Any] = {}
        needed = [key] if key is not None else list(self._weights)

        def accept(name: str, _: Sample, outcome: RewardValue) -> GradingError | None:
            found = name_values(name, outcome)
            values.update(found)
            return find_wrong_value(found, [each for each in needed if each.partition("/")[0] == name])

        calls = [caller.call([sample], accept=partial(accept, name)) for name, caller in self._callers.items()]
        for name, errors in zip(self._callers, await gather_or_cancel(calls), strict=True):
            if errors:
                return {0: replace(errors[0], name=name)}
        error = _set_reward(sample, values, key=key, weights=self._weights)
        return {} if error is None else {0: error}

    def _fail(self, sample: Sample, error: GradingError, source: str | None) -> Failure:
        where = describe_sample(sample, source=source or self._source, name=error.name)
        message = f"{where} {_as_clause(error)}"
        self._num_failed += 1
        level = logging.WARNING if self._num_failed <= MAX_WARNINGS else logging.INFO
        # The traceback once: it is the same for most failures.
        _logger.log(level, "%s%s", message, f"\n{error.traceback}" if error.traceback and self._num_failed == 1 else "")
        if self._num_scored == 0 and self._num_failed >= MAX_FIRST_FAILURES:
            text = f"the first {self._num_failed} samples of the run all failed; the last one: {message}"
            raise RewardError(text) from (UserTraceback(f"\n{error.traceback}") if error.traceback else None)
        return Failure(cause=FailureCause.grader, message=message)


def describe_sample(sample: Sample, *, source: str, name: str = "") -> str:
    """The start of a message: sample, row, and the ends of prompt and answer, which differ most between samples.

    Args:
        name: of the function of several; empty: the only reward.
    """
    prompt = sample.prompt
    label = "no label" if prompt.label_text is None else f"label {_end_of(prompt.label_text)}"
    texts = f"prompt {_end_of(prompt.text)}, {label}, answer {_end_of(sample.answer)}"
    reward = f"reward {name}" if name else "reward"
    return f"{reward} of sample {sample.index} (row {prompt.index + 1} of {source}, {texts})"


def _set_reward(
    sample: Sample, outcome: RewardValue, *, key: str | None, weights: Mapping[str, float]
) -> GradingError | None:
    try:
        sample.reward = select_value(outcome, key, sample, weights=weights)
    except ValueError as error:
        return GradingError(cause=str(error))
    return None


def _as_clause(error: GradingError) -> str:
    return str(error) if error.cause.startswith(("must ", "did not ")) else f"failed: {error}"


def _end_of(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else f"...{text[-MAX_SHOWN_CHARS:]}")


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines; after an error the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        # Calls that have not started would otherwise still run after the failure.
        for task in tasks:
            task.cancel()
        raise
