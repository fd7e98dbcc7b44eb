"""Trainer ranks that send weights side by side: how they wait for each other, and learn of each other's failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from rlscale.errors import EngineError, WeightSyncError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankResult(Generic[T]):
    """What a rank lets the others know."""

    value: T | None = None
    failure: EngineError | WeightSyncError | None = None


class SenderGroup:
    """This rank among all ranks of the trainer, of which some send. Rank 0 leads: it alone pauses engines, and so on.

    Args:
        rank: of this trainer in the default process group.
        senders: the ranks that send a share of the weights. With rank 0 alone no rank ever waits for another here.
    """

    def __init__(self, *, rank: int, senders: Sequence[int] = (0,)) -> None:
        self.rank, self.senders = rank, tuple(senders)

    @property
    def is_one(self) -> bool:
        """Whether rank 0 does everything."""
        return self.senders == (0,)

    @property
    def linked(self) -> list[int]:
        """The ranks that talk to engines."""
        return sorted({0, *self.senders})

    @property
    def is_sender(self) -> bool:
        return self.rank in self.senders

    def meet(self, act: Callable[[], T]) -> list[T]:
        """Does something on this rank, and gives what all ranks have made of it, rank by rank; a collective.

        Raises what it has raised here; else, where another rank failed, that rank's EngineError or WeightSyncError, or
        a WeightSyncError that names the rank. So either all ranks go on or none does.
        """
        mine: _RankResult[T]
        raised: Exception | None = None
        try:
            mine = _RankResult(value=act())
        except Exception as error:  # raised below, when the others know of it
            mine, raised = _RankResult(failure=self._to_others(error)), error
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if raised is not None:
            raise raised
        for told in everyone:
            if told.failure is not None:
                raise told.failure
        return [told.value for told in everyone]

    def _to_others(self, error: Exception) -> EngineError | WeightSyncError:
        if isinstance(error, (EngineError, WeightSyncError)):
            return type(error)(*error.args)
        return WeightSyncError(f"trainer rank {self.rank} must send its weights, got {type(error).__name__}: {error}")
