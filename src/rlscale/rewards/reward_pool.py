"""Processes that score samples."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from rlscale.rewards.call_pool import CallPool, PoolLimits, Reply
from rlscale.rewards.call_process import ENDED_BY_CPU_LIMIT, ChildProgram
from rlscale.rewards.call_server import decode_error
from rlscale.rewards.reward_spec import RewardSpec
from rlscale.rewards.reward_value import GradingError, RewardValue
from rlscale.types import EngineAddress, Sample

Outcome: TypeAlias = RewardValue | GradingError

_PROGRAM = ChildProgram(module="rlscale.rewards.reward_child", name="a reward", timeout_key="reward.timeout_s")
_logger = logging.getLogger(__name__)


class RewardPool:
    """Scores samples in processes; see `CallPool`.

    Example:
        pool = RewardPool(RewardSpec(config=RewardConfig(custom_path="my_reward:score")), PoolLimits())
        (value,) = await pool.call([sample])
        pool.close(wait=True)
    """

    def __init__(self, spec: RewardSpec, limits: PoolLimits) -> None:
        self._spec, self._calls = spec, CallPool(_PROGRAM, spec, limits)

    async def call(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The values of the samples of one call, or why there are none. Adds what the reward put into metadata."""
        reply = await self._calls.call(list(samples))
        try:
            return self._outcomes(samples, reply)
        except (KeyError, TypeError, ValueError):  # user code wrote to the channel of its process
            return [GradingError(cause="its process sent a malformed reply")] * len(samples)

    def set_judge_addresses(self, addresses: Sequence[EngineAddress], model: str | None = None) -> None:
        """Sends the addresses of engines to all processes, and to those that start later.

        `model` as in `JudgeClient.set_addresses`.
        """
        if self._spec.judge is None:
            return
        self._spec = replace(self._spec, judge=self._spec.judge.with_addresses(addresses, model))
        self._calls.spec = self._spec
        self._calls.broadcast("engines", tuple(addresses), model)

    def close(self, *, wait: bool) -> None:
        """Ends the processes; see `CallPool`."""
        self._calls.close(wait=wait)

    def _outcomes(self, samples: Sequence[Sample], reply: Reply) -> list[Outcome]:
        if isinstance(reply, GradingError):
            limit_s = self._spec.max_cpu_s
            if limit_s is None or reply.cause != ENDED_BY_CPU_LIMIT:
                return [reply] * len(samples)
            indices = ", ".join(str(sample.index) for sample in samples)
            _logger.warning("comparing the answer of sample %s took over %g s; it counts as wrong", indices, limit_s)
            return [self._spec.slow_value] * len(samples)
        for sample, changes in zip(samples, reply["metadata"], strict=True):
            sample.metadata |= changes
        return [decode_error(each) if "error" in each else each["value"] for each in reply["values"]]
