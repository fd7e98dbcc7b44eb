"""What an advantage estimator is given and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rlscale.algo.ragged import TokenLayout, check_shape, check_vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """Everything known about a whole rollout before training on it. An estimator reads what it needs."""

    rewards_S: Tensor  # [S] float
    group_ids_S: Tensor  # [S] int64, any values; samples with the same one belong to one prompt
    layout: TokenLayout
    normalize_rewards: bool = True  # False: the raw reward takes the place of the group-centred one
    divide_by_std: bool = True  # False: Dr.GRPO (arXiv:2503.20783)
    kl_T: Tensor | None = None  # [T] KL(old policy, reference) at each token, no gradient; None: 0
    kl_coef: float = 0.0  # weight of the KL in the rewards
    values_T: Tensor | None = None  # [T] a value model's estimate before each token; None: there is none
    gamma: float = 1.0  # discount by trainable token
    lambd: float = 1.0  # lambda of GAE

    def __post_init__(self) -> None:
        check_shape("rewards_S", self.rewards_S, (self.layout.num_samples,))
        check_shape("group_ids_S", self.group_ids_S, (self.layout.num_samples,))
        for name in ("kl_T", "values_T"):
            column = getattr(self, name)
            if column is not None:
                check_vectors(mask_T=self.layout.mask_T, **{name: column})


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """The result; exactly 0 at every token that is not trainable."""

    advantages_T: Tensor  # [T] float, no gradient
    returns_T: Tensor | None = None  # [T] targets of a value model; None for estimators without one


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """One line of the table of estimators, with its function."""

    compute: Callable[[AdvantageInputs], Advantages]
    paper: str
    policy_loss: str = "clip"  # the key of `losses.POLICY_LOSSES` that goes with it
