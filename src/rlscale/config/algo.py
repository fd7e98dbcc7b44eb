"""Group `algo`: advantages and the loss."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.group import ConfigGroup


class AdvantageEstimator(StrEnum):
    """How rewards become advantages."""

    grpo = "grpo"
    gspo = "gspo"
    cispo = "cispo"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    ppo = "ppo"


class LossType(StrEnum):
    """What is minimised."""

    policy_loss = "policy_loss"
    sft_loss = "sft_loss"
    custom_loss = "custom_loss"


class KlType(StrEnum):
    """Estimators of KL(policy || reference)."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_var_kl = "low_var_kl"


@dataclass(kw_only=True)
class AlgoConfig(ConfigGroup):
    """Advantage estimator and loss."""

    advantage_estimator: Annotated[
        AdvantageEstimator, Field(description="How rewards become advantages, and which ratio the loss clips.")
    ] = AdvantageEstimator.grpo
    loss_type: Annotated[
        LossType,
        Field(
            description="`policy_loss`: reinforcement learning. `sft_loss`: likelihood of the labels; nothing is "
            "generated, and rewards and advantages are not used."
        ),
    ] = LossType.policy_loss
    eps_clip: Annotated[
        float, Field(gt=0, description="The ratio is clipped below 1 - this; above 1 + this too by default.")
    ] = 0.2
    eps_clip_high: Annotated[
        float | None, Field(gt=0, description="The ratio is clipped above 1 + this. None: `algo.eps_clip`.")
    ] = None
    eps_clip_c: Annotated[
        float | None,
        Field(
            gt=1,
            description="Dual clip: the loss of a token with a negative advantage is at most -this * advantage. "
            "None: no dual clip.",
        ),
    ] = None
    kl_loss_type: Annotated[
        KlType, Field(description="KL estimator of the KL loss. `k1` has no gradient on average.")
    ] = KlType.k1
    use_kl_loss: Annotated[
        bool,
        Field(
            description="Load a reference model and add `algo.kl_loss_coef` * KL(policy || reference) to the loss; "
            "with the coefficient 0 the KL is only measured."
        ),
    ] = False
    kl_loss_coef: Annotated[
        float, Field(ge=0, description="Weight of the KL loss. Ignored without `algo.use_kl_loss`.")
    ] = 0.0
    use_unbiased_kl: Annotated[
        bool, Field(description="Multiply the KL estimate by the importance ratio new / old policy.")
    ] = False
    entropy_coef: Annotated[
        float, Field(description="Weight of the entropy bonus, which is subtracted from the loss. 0: only measured.")
    ] = 0.0
    grpo_std_normalization: Annotated[
        bool,
        Field(description="Scale centred rewards to the same spread in every group; false (Dr.GRPO) keeps their size."),
    ] = True
    rewards_normalization: Annotated[
        bool, Field(description="Subtract the mean reward of a sample's group; false keeps raw rewards.")
    ] = True
    normalize_advantages: Annotated[
        bool, Field(description="Whiten advantages over all trainable tokens of the rollout.")
    ] = False
    calculate_per_token_loss: Annotated[
        bool, Field(description="Average the loss over tokens instead of first within and then over samples.")
    ] = False
    use_rollout_logprobs: Annotated[
        bool,
        Field(
            description="Take the engine's logprobs as those of the old policy. Excludes `algo.use_tis` and "
            "`algo.decoupled_loss`."
        ),
    ] = False
    decoupled_loss: Annotated[
        bool | None,
        Field(
            description="Decoupled PPO: the ratio is clipped around the trainer's own logprobs at the start of the "
            "rollout's training, and each token's loss is weighed by the ratio of those to the engine's, at most "
            "`algo.decoupled_weight_max`. None: with `rollout.max_staleness` above 0, unless `algo.use_tis` or "
            "`algo.use_rollout_logprobs` is set."
        ),
    ] = None
    decoupled_weight_max: Annotated[
        float, Field(gt=0, description="Upper bound of that weight. Ignored without `algo.decoupled_loss`.")
    ] = 5.0
    use_tis: Annotated[
        bool,
        Field(
            description="Weigh each token's loss by the truncated ratio of the trainer's to the engine's probability."
        ),
    ] = False
    tis_clip: Annotated[
        float, Field(gt=0, description="Upper bound of that weight. Ignored without `algo.use_tis`.")
    ] = 2.0
    tis_clip_low: Annotated[
        float, Field(ge=0, description="Lower bound of that weight. Ignored without `algo.use_tis`.")
    ] = 0.0
