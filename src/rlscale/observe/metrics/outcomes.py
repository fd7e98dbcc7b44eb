"""Outcomes of all trajectories of a run, from its metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "trajectories/"
NOT_OUTCOMES = (f"{PREFIX}open", f"{PREFIX}failed_share")


def describe_outcomes(records: Sequence[Mapping[str, Any]], *, per_rollout: int) -> str | None:
    """E.g. `1,200 trained, 64 (5.0%) dropped by equal_rewards, 3 (0.2%) failed by grader`; None: all were trained.

    Args:
        records: of a metrics file.
        per_rollout: trajectories of a rollout; its record has no outcomes if all of them were trained.
    """
    counts: Counter[str] = Counter()
    for record in records:
        outcomes = {
            name: value for name, value in record.items() if name.startswith(PREFIX) and name not in NOT_OUTCOMES
        }
        # A rollout that trains only the critic has no loss of the policy.
        if not outcomes and any(name.startswith("train/") for name in record):
            outcomes = {f"{PREFIX}trained": per_rollout}
        counts.update({name.removeprefix(PREFIX): int(value) for name, value in outcomes.items()})
    total = counts.total()
    trained = counts.pop("trained", 0)
    if not counts:
        return None
    lost = [
        f"{number:,} ({number / total:.1%}) {kind} by {cause}"
        for outcome, number in counts.most_common()
        for kind, _, cause in [outcome.partition("/")]
    ]
    return ", ".join([f"{trained:,} trained", *lost])
