"""Fates of all trajectories of a run, from its metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "trajectories/"
NOT_FATES = (f"{PREFIX}open", f"{PREFIX}failed_share")


def describe_fates(records: Sequence[Mapping[str, Any]], *, per_rollout: int) -> str | None:
    """E.g. `1,200 trained, 64 (5.0%) dropped by equal_rewards, 3 (0.2%) failed by grader`; None: all were trained.

    Args:
        records: of a metrics file.
        per_rollout: trajectories of a rollout; its record has no fates if all of them were trained.
    """
    counts: Counter[str] = Counter()
    for record in records:
        fates = {name: value for name, value in record.items() if name.startswith(PREFIX) and name not in NOT_FATES}
        if not fates and "train/loss" in record:
            fates = {f"{PREFIX}trained": per_rollout}
        counts.update({name.removeprefix(PREFIX): int(value) for name, value in fates.items()})
    total = counts.total()
    trained = counts.pop("trained", 0)
    if not counts:
        return None
    lost = [
        f"{number:,} ({number / total:.1%}) {kind} by {cause}"
        for fate, number in counts.most_common()
        for kind, _, cause in [fate.partition("/")]
    ]
    return ", ".join([f"{trained:,} trained", *lost])
