"""Rewards to advantages: the table of estimators.

A new estimator is one module beside this one and one line in `ESTIMATORS`; it takes `AdvantageInputs` and returns
`Advantages`. What it needs beyond the present inputs becomes an optional field of `AdvantageInputs`.
"""

from rlscale.algo.advantages.distillation import distill
from rlscale.algo.advantages.group_relative import group_relative, normalize_by_group
from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages, Estimator
from rlscale.algo.advantages.ppo import gae, ppo
from rlscale.algo.advantages.reinforce_plus_plus import reinforce_plus_plus
from rlscale.algo.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from rlscale.algo.advantages.rloo import leave_one_out, rloo

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(compute=group_relative, paper="arXiv:2402.03300"),
    "gspo": Estimator(compute=group_relative, policy_loss="gspo", paper="arXiv:2507.18071"),
    "cispo": Estimator(compute=group_relative, policy_loss="cispo", paper="arXiv:2506.13585"),
    "rloo": Estimator(compute=rloo, paper="arXiv:2402.14740"),
    "reinforce_plus_plus": Estimator(compute=reinforce_plus_plus, paper="arXiv:2501.03262"),
    "reinforce_plus_plus_baseline": Estimator(compute=reinforce_plus_plus_baseline, paper="arXiv:2501.03262"),
    "ppo": Estimator(compute=ppo, paper="arXiv:1707.06347"),
}

__all__ = [
    "ESTIMATORS",
    "AdvantageInputs",
    "Advantages",
    "Estimator",
    "distill",
    "gae",
    "group_relative",
    "leave_one_out",
    "normalize_by_group",
]
