"""Group `algo`: advantages and the loss."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.mis import MisConfig
from rlscale.config.groups.patterns import DOTTED_PATH


class AdvantageEstimator(StrEnum):
    """Advantage estimators: the keys of `rlscale.algo.advantages.ESTIMATORS`."""

    grpo = "grpo"
    gspo = "gspo"
    cispo = "cispo"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    ppo = "ppo"


GROUP_CENTRED = frozenset(
    {
        AdvantageEstimator.grpo,
        AdvantageEstimator.gspo,
        AdvantageEstimator.cispo,
        AdvantageEstimator.reinforce_plus_plus_baseline,
    }
)
"""Those that centre rewards on their group with `algo.rewards_normalization`."""

WITHOUT_KL = frozenset({AdvantageEstimator.grpo, AdvantageEstimator.gspo, AdvantageEstimator.cispo})
"""Those whose advantages know no KL penalty, and which may divide by the group's standard deviation."""

WITH_RETURNS = frozenset({AdvantageEstimator.reinforce_plus_plus, AdvantageEstimator.ppo})
"""Those that sum rewards over the tokens that follow."""


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


class TisType(StrEnum):
    """How tokens are weighed that another policy than the trainer's drew."""

    tis = "tis"
    icepop = "icepop"
    mis = "mis"


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
            "generated, and rewards and advantages are not used. `custom_loss`: `algo.custom_loss_function_path`."
        ),
    ] = LossType.policy_loss
    custom_loss_function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own loss, `package.module:name`, a `LossFunction` of `rlscale.protocols`: the loss at "
            "every trainable token. KL loss and entropy bonus are added to it. None: none; needs "
            "`algo.loss_type=custom_loss` otherwise.",
        ),
    ] = None
    custom_advantage_function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own advantages, `package.module:name`, an `AdvantageFunction` of `rlscale.protocols`; "
            "`algo.advantage_estimator` then only chooses which ratio the loss clips. None: those of the estimator.",
        ),
    ] = None
    compute_advantages_and_returns: Annotated[
        bool,
        Field(
            description="Make the logprob passes and compute advantages; false for a custom loss that needs neither. "
            "Supervised training never does."
        ),
    ] = True
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
    kl_coef: Annotated[
        float,
        Field(
            ge=0,
            description="Weight of the KL penalty in the rewards: -this * KL(old policy || reference) at every token. "
            "Loads a reference model. Excludes `algo.kl_loss_coef`; grpo, gspo and cispo have none.",
        ),
    ] = 0.0
    kl_loss_type: Annotated[
        KlType,
        Field(
            description="KL estimator of the KL loss and of `algo.kl_coef`. `k1` has no gradient on average as a loss."
        ),
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
    ref_update_interval: Annotated[
        int | None,
        Field(
            gt=0,
            description="Copy the policy into the reference model after every this many rollouts. It is then part of a "
            "checkpoint. None: the reference stays as it is.",
        ),
    ] = None
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
    baseline: Annotated[
        float, Field(description="Subtracted from every reward. Cancels where rewards are centred on their group.")
    ] = 0.0
    gamma: Annotated[
        float,
        Field(ge=0, le=1, description="Discount by trainable token. reinforce_plus_plus and ppo only."),
    ] = 1.0
    lambd: Annotated[float, Field(ge=0, le=1, description="Lambda of generalised advantage estimation. ppo only.")] = (
        1.0
    )
    opd_kl_coef: Annotated[
        float,
        Field(
            ge=0,
            description="On-policy distillation: weight of the teacher in the advantages, -this * (logprob of the "
            "policy - logprob of the teacher) at every token. 0: off.",
        ),
    ] = 0.0
    overlong_buffer_len: Annotated[
        int | None,
        Field(
            gt=0,
            description="Soft punishment of long responses: the reward falls linearly over the last this many tokens "
            "before `rollout.max_response_len`, at most by `algo.overlong_penalty`. None: off.",
        ),
    ] = None
    overlong_penalty: Annotated[
        float,
        Field(gt=0, description="What the longest response loses. Ignored without `algo.overlong_buffer_len`."),
    ] = 1.0
    overlong_filter: Annotated[
        bool,
        Field(description="Leave samples out of the loss that were cut off at `rollout.max_response_len`."),
    ] = False
    normalize_advantages: Annotated[
        bool, Field(description="Whiten advantages over all trainable tokens of the rollout.")
    ] = False
    calculate_per_token_loss: Annotated[
        bool, Field(description="Average the loss over tokens instead of first within and then over samples.")
    ] = False
    divide_by_max_response_len: Annotated[
        bool,
        Field(
            description="Dr.GRPO: divide the loss of a sample by `rollout.max_response_len` instead of by its own "
            "number of tokens. Excludes `algo.calculate_per_token_loss`."
        ),
    ] = False
    custom_reducer_function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own average, `package.module:name`, a `ReducerFunction` of `rlscale.protocols`: what a "
            "token of each sample weighs in the loss of a step. None: the mean over samples, or as "
            "`algo.calculate_per_token_loss` and `algo.divide_by_max_response_len` say.",
        ),
    ] = None
    opsm_delta: Annotated[
        float | None,
        Field(
            ge=0,
            description="Off-policy sequence masking: a sample with a negative advantage leaves the loss where the "
            "policy has fallen below the one that drew it by more than this, in nats by token. None: off.",
        ),
    ] = None
    use_rollout_entropy: Annotated[
        bool,
        Field(description="Report `rollout/entropy`: the policy's entropy before it is trained on the rollout."),
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
            description="Weigh each token's loss by the ratio of the trainer's to the engine's probability, bounded as "
            "`algo.tis_type` says."
        ),
    ] = False
    tis_type: Annotated[
        TisType,
        Field(
            description="`tis`: that weight is held within `algo.tis_clip_low` and `algo.tis_clip`. `icepop`: it is 0 "
            "outside of them. `mis`: as `algo.mis` says. Ignored without `algo.use_tis`."
        ),
    ] = TisType.tis
    custom_tis_function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own weights, `package.module:name`, a `WeightFunction` of `rlscale.protocols`, in place "
            "of `algo.tis_type`. Ignored without `algo.use_tis`. None: `algo.tis_type`.",
        ),
    ] = None
    tis_clip: Annotated[
        float, Field(gt=0, description="Upper bound of that weight. Ignored without `algo.use_tis`.")
    ] = 2.0
    tis_clip_low: Annotated[
        float, Field(ge=0, description="Lower bound of that weight. Ignored without `algo.use_tis`.")
    ] = 0.0
    mis: MisConfig = field(default_factory=MisConfig)
    use_routing_replay: Annotated[
        bool,
        Field(
            description="Route tokens to the experts in training as they were routed for the old logprobs. With "
            "`train.backend=megatron`."
        ),
    ] = False
    use_rollout_routing_replay: Annotated[
        bool,
        Field(
            description="Route tokens to the experts that the engine chose while it generated them, for old logprobs "
            "and in training. Engines return these routes with every sample. With `train.backend=megatron`, in the "
            "place of `algo.use_routing_replay`."
        ),
    ] = False


def compares_policies(algo: AlgoConfig) -> bool:
    """Whether old, and perhaps reference, logprobs and advantages are computed."""
    is_custom = algo.loss_type == LossType.custom_loss and algo.compute_advantages_and_returns
    return algo.loss_type == LossType.policy_loss or is_custom


def uses_teacher(algo: AlgoConfig) -> bool:
    """Whether a teacher model is loaded, for on-policy distillation."""
    return compares_policies(algo) and algo.opd_kl_coef > 0


def uses_critic(algo: AlgoConfig) -> bool:
    """Whether a value model is trained beside the policy: for ppo, unless the advantages are the user's own."""
    is_ppo = algo.advantage_estimator == AdvantageEstimator.ppo
    return is_ppo and compares_policies(algo) and algo.custom_advantage_function_path is None


def uses_reference(algo: AlgoConfig) -> bool:
    """Whether a reference model is loaded: for a KL loss, or for a KL penalty in the rewards."""
    return compares_policies(algo) and (algo.use_kl_loss or algo.kl_coef > 0)
