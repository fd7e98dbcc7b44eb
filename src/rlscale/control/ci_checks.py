"""What must hold in every run: `ci.*`. A test of rlscale, or of a plug-in, runs with them on."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.config import CiConfig
from rlscale.errors import CheckError
from rlscale.protocols import Engine
from rlscale.types import TrainResult, WeightVersion

KL_LIMIT = 1e-5
"""In nats. Policy and reference have the same weights at first; kernels with and without gradient may round apart."""


async def check_versions(engines: Sequence[Engine], version: WeightVersion) -> None:
    """Raises CheckError when an engine holds other weights than the trainer has just sent."""
    for engine in engines:
        held = await engine.weight_version()
        if held != version:
            raise CheckError(f"{engine.address.name} must hold weight version {version} after the sync, got {held}")


def check_logprobs(result: TrainResult, *, limit: float) -> None:
    """Raises CheckError when trainer and engine differ by more than `limit` on average."""
    diff = result.metrics.get("logprob_diff/mean", 0.0)
    if not diff <= limit:
        raise CheckError(f"logprob_diff/mean must be at most {limit:g} with ci.enabled, got {diff:g}")


def check_reference(result: TrainResult) -> None:
    """Raises CheckError when the policy, not trained yet, is another model than its reference."""
    first = result.steps[0] if result.steps else {}
    measured = {"train/kl_loss of the first step": first.get("kl_loss"), "rollout/kl": result.metrics.get("rollout/kl")}
    for name, value in measured.items():
        if value is not None and not abs(value) <= KL_LIMIT:
            raise CheckError(
                f"{name} must be 0 before anything is trained, got {value:g}; a run that starts elsewhere than its "
                "reference sets ci.disable_kl_checker=true"
            )


def check_metric(ci: CiConfig, records: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckError when the metric of `ci.metric_checker_key` never was at its threshold or above.

    Args:
        records: of the whole run, as in `metrics.jsonl`.
    """
    key, threshold = ci.metric_checker_key, ci.metric_checker_threshold
    if key is None or threshold is None:
        return
    values = [float(record[key]) for record in records if key in record]
    if not values:
        raise CheckError(f"{key} (ci.metric_checker_key) must be a metric of the run, got none of this name")
    if max(values) < threshold:
        raise CheckError(
            f"{key} must reach {threshold:g} (ci.metric_checker_threshold) at least once, got {max(values):g} at most "
            f"in {len(values)} records"
        )
