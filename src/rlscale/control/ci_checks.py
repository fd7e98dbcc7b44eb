"""Assertions that `ci.*` adds to a run, for tests of rlscale and of plug-ins."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.config import CiConfig
from rlscale.errors import CheckError
from rlscale.protocols import Engine
from rlscale.types import TrainResult, WeightVersion

KL_LIMIT = 1e-5
"""Nats. Policy and reference start with equal weights; kernels with and without gradient may round differently."""


async def check_versions(engines: Sequence[Engine], version: WeightVersion) -> None:
    """Raises CheckError when an engine reports another weight version than the trainer has just sent."""
    for engine in engines:
        found = await engine.weight_version()
        if found != version:
            raise CheckError(f"{engine.address.name} must hold weight version {version} after the sync, got {found}")


def check_logprobs(result: TrainResult, *, limit: float) -> None:
    """Raises CheckError when trainer and engine logprobs differ by more than `limit` on average."""
    diff = result.metrics.get("logprob_diff/mean", 0.0)
    # Negated, so that NaN fails.
    if not diff <= limit:
        raise CheckError(f"logprob_diff/mean must be at most {limit:g} with ci.enabled, got {diff:g}")


def check_reference(result: TrainResult) -> None:
    """Raises CheckError when the KL divergence of the untrained policy from its reference is not 0."""
    first = result.steps[0] if result.steps else {}
    measured = {"train/kl_loss of the first step": first.get("kl_loss"), "rollout/kl": result.metrics.get("rollout/kl")}
    for name, value in measured.items():
        if value is not None and not abs(value) <= KL_LIMIT:
            raise CheckError(
                f"{name} must be 0 before any training, got {value:g}; set ci.disable_kl_checker=true for a run that "
                "starts from other weights than its reference"
            )


def check_metric(ci: CiConfig, records: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckError when the metric `ci.metric_checker_key` never reached its threshold.

    Args:
        records: all of the run, as in `metrics.jsonl`.
    """
    key, threshold = ci.metric_checker_key, ci.metric_checker_threshold
    if key is None or threshold is None:
        return
    values = [float(record[key]) for record in records if key in record]
    if not values:
        raise CheckError(f"{key} (ci.metric_checker_key) must be a metric of the run, got no record with this name")
    if max(values) < threshold:
        raise CheckError(
            f"{key} must reach {threshold:g} (ci.metric_checker_threshold) at least once, got at most {max(values):g} "
            f"in {len(values)} records"
        )
