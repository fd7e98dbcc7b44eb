"""Rewards to advantages: the table of estimators.

A new estimator is one module beside this one and one line in `ESTIMATORS`; it takes `AdvantageInputs` and returns
`Advantages`. What it needs beyond the present inputs becomes an optional field of `AdvantageInputs`.
"""

from rlscale.algo.advantages.group_relative import group_relative, normalize_by_group
from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages, Estimator

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(compute=group_relative, paper="arXiv:2402.03300"),
    "gspo": Estimator(compute=group_relative, policy_loss="gspo", paper="arXiv:2507.18071"),
    "cispo": Estimator(compute=group_relative, policy_loss="cispo", paper="arXiv:2506.13585"),
}

__all__ = ["ESTIMATORS", "AdvantageInputs", "Advantages", "Estimator", "group_relative", "normalize_by_group"]
