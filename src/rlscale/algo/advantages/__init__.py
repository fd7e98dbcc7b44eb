"""Rewards to advantages.

A new estimator is one module beside this one and one line in the table `AdvantageEstimator` of the config, where its
name is a choice of `algo.advantage_estimator`. It takes `AdvantageInputs` and returns `Advantages`. What it needs
beyond the present inputs becomes an optional field of `AdvantageInputs`.
"""

from importlib import import_module

from rlscale.algo.advantages.distillation import distill
from rlscale.algo.advantages.group_relative import group_relative, normalize_by_group
from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages, Estimator
from rlscale.algo.advantages.ppo import gae
from rlscale.algo.advantages.rloo import leave_one_out
from rlscale.config import AdvantageEstimator


def _estimator(line: AdvantageEstimator) -> Estimator:
    module, name = line.function.split(":")
    # By name: the table is read where torch is not imported.
    compute = getattr(import_module(f"{__name__}.{module}"), name)
    return Estimator(compute=compute, paper=line.paper, policy_loss=line.policy_loss)


ESTIMATORS: dict[str, Estimator] = {line.value: _estimator(line) for line in AdvantageEstimator}

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
