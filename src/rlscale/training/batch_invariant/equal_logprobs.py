"""Check of `train.true_on_policy_mode` after every rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rlscale.errors import WorkerError


def check_equal_logprobs(metrics: Mapping[str, float], *, rank: int, num_rollouts: int) -> None:
    """Raises WorkerError unless trainer and engine logprobs of the current weights are bitwise equal.

    Args:
        metrics: of the rollout, over all ranks.
        rank: of this process.
        num_rollouts: trained on before this one.
    """
    largest = metrics.get("logprob_diff/max", 0.0)
    if largest == 0.0:
        return
    cause = f"the logprobs of rollout {num_rollouts} must equal the engine's bit for bit with train.true_on_policy_mode"
    advice = "use the same torch version and processor type for trainer and engines, and deterministic engines"
    raise WorkerError(
        f"actor rank {rank}", f"{cause}, got a difference of {largest:g}; {advice}", failed_at_s=time.time()
    )
