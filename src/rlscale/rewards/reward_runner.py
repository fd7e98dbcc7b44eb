"""Scores groups in threads, outside the event loop that drives the run."""

import asyncio
import math
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import iscoroutine
from numbers import Real
from threading import Thread
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from rlscale.errors import RewardError
from rlscale.protocols import Reward
from rlscale.types import Group, Sample


@runtime_checkable
class Closable(Protocol):
    """A reward with resources (processes, a session) may implement this; called at the end of the run."""

    def close(self) -> None: ...


class RewardRunner:
    """Calls a reward for every sample of a group, at most `max_workers` at a time.

        score(group) ── sample ──> worker thread: reward(sample) ── a number ──────────────> sample.reward
                                        └─ a coroutine ──> one event loop of all async rewards ┘

    A reward that blocks, or computes for seconds, never delays the event loop of engines and trainers. Async rewards
    share one loop, and so can share sessions and locks.

    Example:
        with RewardRunner(exact_match, max_workers=4) as rewards:
            await rewards.score(group)
    """

    def __init__(self, reward: Reward, *, max_workers: int) -> None:
        self._reward = reward
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="reward")
        self._loop = asyncio.new_event_loop()
        self._loop_thread = Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)

    def __enter__(self) -> Self:
        self._loop_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def close(self, *, wait: bool) -> None:
        """Stops the threads; without `wait` a reward that hangs does not block the exit of a failed run."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
        # The loop runs in another thread and may only be stopped from there.
        self._loop.call_soon_threadsafe(self._loop.stop)
        if wait:
            self._loop_thread.join()
            self._loop.close()
        if isinstance(self._reward, Closable):
            self._reward.close()

    async def score(self, group: Group, *, key: str | None = None) -> None:
        """Sets `reward` of every sample.

        Args:
            key: the number to use of a reward that returns several by name; all of them are stored in the sample's
                metadata as `rewards`. None: the reward returns one number.

        Raises:
            RewardError: the reward raised, or returned no finite number; the message names the sample.
        """
        running = asyncio.get_running_loop()
        calls = [running.run_in_executor(self._threads, self._call, sample, key) for sample in group.samples]
        try:
            rewards = await asyncio.gather(*calls)
        except BaseException:
            # Calls that have not started would otherwise still run after the failure.
            for call in calls:
                call.cancel()
            raise
        for sample, reward in zip(group.samples, rewards, strict=True):
            sample.reward = reward

    def _call(self, sample: Sample, key: str | None) -> float:
        where = f"reward of sample {sample.index} (group {sample.group_index}, prompt row {sample.prompt.index + 1})"
        try:
            value: Any = self._reward(sample)
            if iscoroutine(value):
                value = self._run(value)
        except Exception as error:  # any type: re-raised with the sample; the run stops
            raise RewardError(f"{where} failed: {type(error).__name__}: {error}") from error
        if isinstance(value, Mapping) or key is not None:
            value = _select_key(value, key, sample, where=where)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"{where} must be a finite number, got {value!r}; return a float from the reward")
        return float(value)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()


def _select_key(value: Any, key: str | None, sample: Sample, *, where: str) -> Any:
    """Returns the number to train on from a reward that returns several."""
    if not isinstance(value, Mapping):
        raise RewardError(f"{where} must be a mapping with reward.key={key}, got {value!r}; remove reward.key")
    names = ", ".join(map(str, value))
    if key is None:
        raise RewardError(f"{where} must be a finite number, got a mapping; set reward.key to one of {names}")
    if key not in value:
        raise RewardError(f"{where} must have an entry {key!r}, got {names}; set reward.key, or eval.reward_key")
    sample.metadata["rewards"] = {str(name): each for name, each in value.items()}
    return value[key]
