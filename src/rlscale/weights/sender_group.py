"""The trainer ranks that send weights: their barriers, and how a failure on one reaches all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from rlscale.errors import EngineError, WeightSyncError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankResult(Generic[T]):
    """The value or the failure of one rank."""

    value: T | None = None
    failure: EngineError | WeightSyncError | None = None


class SenderGroup:
    """The rank among all ranks of the trainer, of which some send. Rank 0 leads: it alone pauses and resumes engines.

    Args:
        rank: of this trainer in the default process group.
        senders: the ranks that send a part of the weights. With rank 0 alone no rank waits for another here.
    """

    def __init__(self, *, rank: int, senders: Sequence[int] = (0,)) -> None:
        self.rank, self.senders = rank, tuple(senders)

    @property
    def is_single(self) -> bool:
        """Whether rank 0 is the only sender."""
        return self.senders == (0,)

    @property
    def is_sender(self) -> bool:
        return self.rank in self.senders

    @property
    def is_active(self) -> bool:
        """Whether this rank takes part in the steps of a sync beyond gathering weights."""
        return self.rank == 0 or not self.is_single

    @property
    def linked_ranks(self) -> list[int]:
        """The ranks that talk to engines."""
        return sorted({0, *self.senders})

    def all_gather_result(self, act: Callable[[], T]) -> list[T]:
        """Calls `act` and returns the results of all ranks, by rank. A collective, unless rank 0 is the only sender.

        Raises what `act` raised on this rank. Otherwise, if another rank failed, raises that rank's EngineError or
        WeightSyncError, or a WeightSyncError that names the rank. So either all ranks continue or none does.
        """
        if self.is_single:
            return [act()]
        own: _RankResult[T]
        raised: Exception | None = None
        try:
            own = _RankResult(value=act())
        except Exception as error:  # raised below, after the other ranks have received it
            own, raised = _RankResult(failure=self._as_failure(error)), error
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, own)
        if raised is not None:
            raise raised
        for result in results:
            if result.failure is not None:
                raise result.failure
        return [result.value for result in results]

    def _as_failure(self, error: Exception) -> EngineError | WeightSyncError:
        # A copy from the arguments: a traceback cannot be pickled.
        if isinstance(error, (EngineError, WeightSyncError)):
            return type(error)(*error.args)
        return WeightSyncError(f"trainer rank {self.rank} must send its weights, got {type(error).__name__}: {error}")
