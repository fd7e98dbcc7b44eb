"""The one list of what the configuration can name and this version cannot do yet.

Building a part means deleting its line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlscale.config.algo import AdvantageEstimator
from rlscale.config.optim import LrDecayStyle, OptimizerName
from rlscale.config.problems import show
from rlscale.config.reward import RewardType
from rlscale.config.rollout import EngineKind
from rlscale.config.run import RunConfig
from rlscale.config.train import TrainBackendName
from rlscale.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The values of a key that work, and what to write to get one of them."""

    values: tuple[Any, ...]
    fix: str


BUILT: Mapping[str, Built] = MappingProxyType(
    {
        "train.backend": Built(values=(TrainBackendName.fsdp,), fix="choose train=fsdp"),
        "rollout.engine": Built(
            values=(EngineKind.embedded, EngineKind.sglang), fix="choose rollout=embedded or rollout=sglang"
        ),
        "optim.name": Built(values=(OptimizerName.adam,), fix="set optim.name=adam"),
        "optim.lr_decay_style": Built(
            values=(LrDecayStyle.constant, LrDecayStyle.linear, LrDecayStyle.cosine),
            fix="choose optim=constant, optim=linear or optim=cosine",
        ),
        "algo.advantage_estimator": Built(
            values=tuple(each for each in AdvantageEstimator if each != AdvantageEstimator.ppo),
            fix="ppo needs a critic; choose algo=grpo or algo=reinforce_plus_plus",
        ),
        "algo.opd_kl_coef": Built(values=(0.0,), fix="there is no teacher model yet"),
        "algo.use_routing_replay": Built(values=(False,), fix="leave it out"),
        "reward.type": Built(
            values=(None, RewardType.exact_match, RewardType.math, RewardType.random),
            fix="choose reward=exact_match or reward=math, or set reward.custom_path",
        ),
    }
)


def check_built(config: RunConfig) -> list[Problem]:
    """One problem for each key whose value names a part that is not there yet."""
    problems = []
    for path, built in BUILT.items():
        group, name = path.split(".")
        value = getattr(getattr(config, group), name)
        if value not in built.values:
            rule = f"be one of the parts built so far ({', '.join(show(item) for item in built.values)})"
            problems.append(Problem(path=path, rule=rule, value=show(value), fix=built.fix))
    return problems
