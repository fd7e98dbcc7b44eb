"""What an optimiser step is told from outside, and what is checked before it changes a weight."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from rlscale.errors import WorkerError
from rlscale.training.optim import names_with_bad_gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What one optimiser step is told from outside."""

    number: int  # 0-based, in the whole run
    lr: float
    max_grad_norm: float  # 0: no clipping


def check_loss(shares: Sequence[float], *, step: int, ranks: Sequence[int] | None = None) -> None:
    """Raises WorkerError naming the first rank whose share of the loss is not finite.

    Args:
        shares: of each rank.
        step: the number of the optimiser step, for the message.
        ranks: the numbers of those ranks in the world; None: their places in `shares`.
    """
    for place, share in enumerate(shares):
        if not math.isfinite(share):
            rank = place if ranks is None else ranks[place]
            raise _failure(rank, f"the loss of optimiser step {step} must be finite, got {share}")


def check_gradient(norm: float, *, step: int, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises WorkerError for a norm that is not finite, naming the first of this rank's parameters that made it so."""
    if math.isfinite(norm):
        return
    names = names_with_bad_gradient(named_parameters)
    place = f"on this rank in {len(names)} parameters, the first is {names[0]}" if names else "on other ranks only"
    raise _failure(dist.get_rank(), f"the gradient norm of optimiser step {step} must be finite, got {norm} ({place})")


def _failure(rank: int, cause: str) -> WorkerError:
    advice = "lower optim.lr or optim.clip_grad, or go on from an earlier checkpoint"
    return WorkerError(f"actor rank {rank}", f"{cause}; {advice}", failed_at_s=time.time())
