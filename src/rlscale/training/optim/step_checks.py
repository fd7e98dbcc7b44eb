"""Settings of an optimiser step, and the checks before it changes a weight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from rlscale.errors import WorkerError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Number, learning rate and clipping of one optimiser step."""

    number: int  # 0-based, in the whole run
    lr: float
    max_grad_norm: float  # 0: no clipping
    role: str = "actor"  # of the rank, for messages


def check_loss(shares: Sequence[float], *, step: int, ranks: Sequence[int] | None = None, role: str = "actor") -> None:
    """Raises WorkerError naming the first rank whose share of the loss is not finite.

    Args:
        shares: of each rank.
        step: the number of the optimiser step, for the message.
        ranks: numbers of those ranks in the world; None: their indices in `shares`.
        role: of the ranks, for the message.
    """
    for place, share in enumerate(shares):
        if not math.isfinite(share):
            rank = place if ranks is None else ranks[place]
            raise _failure(role, rank, f"the loss of optimiser step {step} must be finite, got {share}")


def check_gradient(norm: float, *, step: int, bad_names: Callable[[], list[str]], role: str = "actor") -> None:
    """Raises WorkerError for a norm that is not finite. `bad_names` returns the parameters at fault on this rank."""
    if math.isfinite(norm):
        return
    names = bad_names()
    place = f"on this rank in {len(names)} parameters, the first is {names[0]}" if names else "on other ranks only"
    cause = f"the gradient norm of optimiser step {step} must be finite, got {norm} ({place})"
    raise _failure(role, dist.get_rank(), cause)


def _failure(role: str, rank: int, cause: str) -> WorkerError:
    advice = "lower optim.lr or optim.clip_grad, or resume from an earlier checkpoint"
    return WorkerError(f"{role} rank {rank}", f"{cause}; {advice}", failed_at_s=time.time())
