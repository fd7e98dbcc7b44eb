"""Group `algo`: advantages and the loss."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class AdvantageEstimator(StrEnum):
    """Advantage estimators: the keys of `rlscale.algo.advantages.ESTIMATORS`."""

    grpo = "grpo"
    gspo = "gspo"
    cispo = "cispo"
    gpg = "gpg"
    gdpo = "gdpo"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    ppo = "ppo"


GROUP_CENTRED = frozenset(
    {
        AdvantageEstimator.grpo,
        AdvantageEstimator.gspo,
        AdvantageEstimator.cispo,
        AdvantageEstimator.gpg,
        AdvantageEstimator.reinforce_plus_plus_baseline,
    }
)
"""Estimators that subtract the mean reward of the group with `algo.rewards_normalization`."""

ALWAYS_CENTRED = frozenset({AdvantageEstimator.rloo, AdvantageEstimator.gdpo})
"""Estimators that compare rewards within a group, whatever `algo.rewards_normalization` is."""

WITHOUT_KL = frozenset(
    {
        AdvantageEstimator.grpo,
        AdvantageEstimator.gspo,
        AdvantageEstimator.cispo,
        AdvantageEstimator.gpg,
        AdvantageEstimator.gdpo,
    }
)
"""Estimators without a KL penalty, which can divide by the standard deviation of the group."""

WITH_RETURNS = frozenset({AdvantageEstimator.reinforce_plus_plus, AdvantageEstimator.ppo})
"""Estimators that compute returns per token."""


class PolicyLossName(StrEnum):
    """Losses of `algo.loss_type=policy_loss`: the keys of `rlscale.algo.losses.POLICY_LOSSES`."""

    clip = "clip"
    gspo = "gspo"
    cispo = "cispo"
    sapo = "sapo"
    reinforce = "reinforce"


LOSS_OF_ESTIMATOR = {
    AdvantageEstimator.gspo: PolicyLossName.gspo,
    AdvantageEstimator.cispo: PolicyLossName.cispo,
    AdvantageEstimator.gpg: PolicyLossName.reinforce,
}
"""Default losses of the estimators whose default is not `clip`."""


class RewardScale(StrEnum):
    """Rewards whose standard deviation divides the centred rewards."""

    group = "group"
    batch = "batch"


class LossType(StrEnum):
    """Losses of the policy."""

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
    """Importance weights of tokens that the engine sampled with slightly different probabilities."""

    tis = "tis"
    icepop = "icepop"
    mis = "mis"


class OpdKl(StrEnum):
    """Divergences from the teacher of on-policy distillation."""

    sampled = "sampled"
    top_k = "top_k"
    full = "full"


class OpdDirection(StrEnum):
    """Directions of the divergence from the teacher."""

    reverse = "reverse"
    forward = "forward"


class MisLevel(StrEnum):
    """Levels at which the ratio of trainer to engine is computed."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class MisMode(StrEnum):
    """Treatments of weights outside their bounds."""

    truncate = "truncate"
    clip = "clip"
    mask = "mask"


@dataclass(kw_only=True)
class MisConfig(ConfigGroup):
    """Masked importance sampling. Needs `algo.use_tis` and `algo.tis_type=mis`."""

    # Weights.
    level: MisLevel = MisLevel.token
    """Level of the ratio. `token`: one ratio per token. `sequence`: the product over the response. `geometric`: the
    geometric mean over the response.
    """

    mode: MisMode = MisMode.truncate
    """Bounds of the weights. `truncate`: at most `algo.tis_clip`. `clip`: also at least `algo.mis.low`. `mask`: set to
    0 outside these bounds.
    """

    low: Annotated[float | None, Field(ge=0)] = None
    """Lower bound of a weight. None: 1 / `algo.tis_clip`."""

    # Rejection.
    reject_level: MisLevel | None = None
    """Reject from the loss the tokens (`token`) or responses (`sequence`, `geometric`) with a ratio of this level
    outside [`algo.mis.reject_low`, `algo.mis.reject_high`]. None: no rejection.
    """

    reject_low: Annotated[float | None, Field(ge=0)] = None
    """Lower bound of accepted ratios. None: 1 / upper bound. No effect without `algo.mis.reject_level`."""

    reject_high: Annotated[float | None, Field(gt=0)] = None
    """Upper bound of accepted ratios. None: `algo.tis_clip`. No effect without `algo.mis.reject_level`."""

    veto: Annotated[float | None, Field(gt=0)] = None
    """Reject a response from the loss if the ratio of any token is below this, e.g. 1e-4. None: off."""

    normalize: bool = False
    """Divide the weights by their mean over the rollout: over tokens with `algo.mis.level=token`, over samples
    otherwise. Requires a separate pass for the logprobs of the trainer.
    """


@dataclass(kw_only=True)
class AlgoConfig(ConfigGroup):
    """Advantage estimator and loss."""

    advantage_estimator: AdvantageEstimator = AdvantageEstimator.grpo
    """Advantage estimator. It also selects the default of `algo.policy_loss`."""

    policy_loss: PolicyLossName | None = None
    """Loss of the policy. `clip`: clipped ratio per token (PPO). `gspo`: clipped ratio of the whole response. `cispo`:
    clipped importance weight. `sapo`: a soft gate of the ratio instead of a clip. `reinforce`: -advantage * logprob,
    without ratio; importance weights by `algo.use_tis` or `algo.decoupled_loss`. None: the loss of
    `algo.advantage_estimator`: `gspo` and `cispo` have their own, `gpg` has `reinforce`, the others `clip`.
    """

    loss_type: LossType = LossType.policy_loss
    """`policy_loss`: reinforcement learning. `sft_loss`: negative log-likelihood of the labels; no generation, rewards
    or advantages. `custom_loss`: `algo.custom_loss_function_path`.
    """

    custom_loss_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own loss per token, `package.module:name`, a `LossFunction` of `rlscale.hook_protocols`, or a
    `LogitsLossFunction`, which has a parameter `logits`. KL loss and entropy bonus are added to it. None: only allowed
    without `algo.loss_type=custom_loss`. No effect with other losses.
    """

    custom_advantage_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own advantages, `package.module:name`, an `AdvantageFunction` of `rlscale.hook_protocols`.
    `algo.advantage_estimator` then only selects the policy loss. None: advantages of `algo.advantage_estimator`.
    """

    compute_advantages_and_returns: bool = True
    """Compute logprobs and advantages before training. false: skip both, for a custom loss that needs neither. No
    effect with `algo.loss_type=sft_loss`.
    """

    # Clipping of the policy ratio.
    eps_clip: Annotated[float, Field(gt=0)] = 0.2
    """Lower clip range: the policy ratio is clipped below 1 - `algo.eps_clip`. Also the default of the upper clip
    range. Without effect where the ratio is 1: with one optimiser step per rollout and old logprobs of the trainer.
    """

    eps_clip_high: Annotated[float | None, Field(gt=0)] = None
    """Upper clip range: the policy ratio is clipped above 1 + `algo.eps_clip_high`. None: `algo.eps_clip`."""

    eps_clip_c: Annotated[float | None, Field(gt=1)] = None
    """Dual clip: upper bound of the loss of a token with negative advantage, as a multiple of -advantage. None: no dual
    clip. No effect with `algo.advantage_estimator=cispo`.
    """

    sapo_temperature_pos: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of SAPO's gate for tokens with positive advantage: the larger, the faster the gradient decreases as
    the ratio leaves 1. No effect without `algo.policy_loss=sapo`.
    """

    sapo_temperature_neg: Annotated[float, Field(gt=0)] = 1.05
    """The same for tokens with negative advantage. No effect without `algo.policy_loss=sapo`."""

    # KL to a reference model.
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL penalty in the rewards: -`algo.kl_coef` * KL(old policy || reference) at each token. Above
    0 a reference model is loaded. Cannot be combined with `algo.kl_loss_coef`, nor with grpo, gspo, cispo, gpg and
    gdpo.
    """

    kl_loss_type: KlType = KlType.k1
    """KL estimator of the KL loss and of `algo.kl_coef`. As a loss, `k1` has an expected gradient of 0. No effect
    without a reference model.
    """

    use_kl_loss: bool = False
    """Load a reference model and add `algo.kl_loss_coef` * KL(policy || reference) to the loss. With
    `algo.kl_loss_coef=0` the KL is only logged.
    """

    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL loss. No effect without `algo.use_kl_loss`."""

    use_unbiased_kl: bool = False
    """Multiply the KL estimate by the importance ratio of policy to old policy. No effect without `algo.use_kl_loss`.
    """

    ref_update_interval: Annotated[int | None, Field(gt=0)] = None
    """Number of rollouts after which the policy is copied into the reference model; checkpoints then include the
    reference. None: the reference does not change. No effect without a reference model.
    """

    # Entropy bonus and scale of rewards.
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss. 0: the entropy is only logged."""

    grpo_std_normalization: bool = True
    """Divide the centred rewards of a group by a standard deviation. false: keep their scale, as Dr.GRPO does. Only for
    grpo, gspo, cispo and gpg, with `algo.rewards_normalization`, and for gdpo.
    """

    scale_rewards: RewardScale = RewardScale.group
    """Rewards whose standard deviation `algo.grpo_std_normalization` divides by. `group`: those of the group. `batch`:
    all rewards of the rollout. Only for grpo, gspo, cispo and gpg.
    """

    rewards_normalization: bool = True
    """Subtract the mean reward of the group. false: use raw rewards. Only for grpo, gspo, cispo, gpg and
    reinforce_plus_plus_baseline.
    """

    baseline: float = 0.0
    """Constant subtracted from every reward. No effect where rewards are compared within a group."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor per trainable token. Only for reinforce_plus_plus and ppo."""

    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of generalised advantage estimation (GAE). Only for ppo."""

    lambd_critic: Annotated[float | None, Field(ge=0, le=1)] = None
    """Lambda of the returns that the critic learns; VAPO uses 1.0. None: `algo.lambd`. Only for ppo."""

    lambd_alpha: Annotated[float | None, Field(gt=0)] = None
    """Lambda of the advantages by length, as in VAPO: 1 - 1 / (`algo.lambd_alpha` * trainable tokens of the response),
    at least 0. None: `algo.lambd` for every length. Only for ppo.
    """

    opd_kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """On-policy distillation: adds -`algo.opd_kl_coef` * (logprob of the policy - logprob of the teacher) to the
    advantage of each token. 0: off.
    """

    opd_kl: OpdKl = OpdKl.sampled
    """Divergence from the teacher. `sampled`: the estimate from the sampled token, in the advantages. `top_k`:
    `algo.opd_kl_coef` * KL over the `algo.opd_top_k` most likely tokens of the teacher and one outcome for all others,
    added to the loss. `full`: the same over the whole vocabulary. Their logits exist in chunks
    (`train.log_probs_chunk_size`), where those of the policy do. Metric `train/teacher_kl`.
    """

    opd_top_k: Annotated[int, Field(gt=0)] = 64
    """Most likely tokens of the teacher whose logprobs a sample gets, at each of its tokens (`distillation_loss.topk`
    of verl). No effect without `algo.opd_kl=top_k`.
    """

    opd_direction: OpdDirection = OpdDirection.reverse
    """`reverse`: KL(policy || teacher). `forward`: KL(teacher || policy) (`forward_kl_topk` of verl). No effect with
    `algo.opd_kl=sampled`.
    """

    # Long responses.
    overlong_buffer_len: Annotated[int | None, Field(gt=0)] = None
    """Soft penalty for long responses: over this number of tokens before `rollout.max_response_len`, the reward
    decreases linearly by up to `algo.overlong_penalty`. None: off.
    """

    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Maximum penalty of a response of `rollout.max_response_len` tokens. No effect without `algo.overlong_buffer_len`.
    """

    overlong_filter: bool = False
    """Exclude samples that were truncated at `rollout.max_response_len` from the loss."""

    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by further prompts (DAPO). Sets an unset
    `sampling.dynamic_filter_path`.
    """

    # Passes over a rollout.
    ppo_epochs: Annotated[int, Field(gt=0)] = 1
    """Passes of policy and critic over each rollout (`num_iterations` in TRL). Old logprobs and advantages are those
    before the first pass. The optimiser steps of a later pass have the same samples in another, seeded order.
    """

    # Averages over tokens and samples.
    normalize_advantages: bool = False
    """Whiten the advantages over all trainable tokens of the rollout."""

    calculate_per_token_loss: bool = False
    """Average the loss over all tokens. false: average over the tokens of each sample first, then over samples."""

    divide_by_max_response_len: bool = False
    """Dr.GRPO: divide the loss of a sample by `rollout.max_response_len` instead of its number of tokens. Cannot be
    combined with `algo.calculate_per_token_loss`.
    """

    custom_reducer_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own loss reduction, `package.module:name`, a `ReducerFunction` of `rlscale.hook_protocols`: it returns the
    weight of each sample in the loss of a step. None: the mean over samples, or as set by
    `algo.calculate_per_token_loss` and `algo.divide_by_max_response_len`.
    """

    # Old logprobs and off-policy corrections.
    opsm_delta: Annotated[float | None, Field(ge=0)] = None
    """Off-policy sequence masking: mask a sample with negative advantage if the logprobs of the policy are below those
    of the policy that generated it by more than this on average, in nats per token. None: off.
    """

    use_rollout_entropy: bool = False
    """Log `rollout/entropy`, the entropy of the policy before it is trained on the rollout."""

    use_rollout_logprobs: bool = False
    """Use the logprobs of the engine as old logprobs. Cannot be combined with `algo.use_tis` or `algo.decoupled_loss`.
    """

    decoupled_loss: bool | None = None
    """Decoupled PPO: clip the ratio around the logprobs of the trainer at the start of training on the rollout, and
    weight the loss of each token by their ratio to the logprobs of the engine, capped at `algo.decoupled_weight_max`.
    None: on if `rollout.max_staleness` is above 0, unless `algo.use_tis`, `algo.use_rollout_logprobs` or
    `train.keep_old_actor` is set.
    """

    decoupled_weight_max: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of the weight of `algo.decoupled_loss`. No effect without it."""

    use_tis: bool = False
    """Truncated importance sampling: weight the loss of each token by the probability ratio of trainer to engine,
    bounded as set by `algo.tis_type`.
    """

    tis_type: TisType = TisType.tis
    """Bounds of the weight of `algo.use_tis`. `tis`: clipped to [`algo.tis_clip_low`, `algo.tis_clip`]. `icepop`: set
    to 0 outside that range. `mis`: as set by `algo.mis`. No effect without `algo.use_tis`.
    """

    custom_tis_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own weights, `package.module:name`, a `WeightFunction` of `rlscale.hook_protocols`. Replaces
    `algo.tis_type`. No effect without `algo.use_tis`. None: `algo.tis_type`.
    """

    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the weight. No effect without `algo.use_tis`."""

    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the weight. No effect without `algo.use_tis` or with `algo.tis_type=mis`."""

    mis: MisConfig = field(default_factory=MisConfig)
    # Expert routes (MoE).
    use_routing_replay: bool = False
    """Route tokens in training to the experts that the pass for the old logprobs selected. Needs a model with
    experts.
    """

    use_rollout_routing_replay: bool = False
    """Route tokens in training, and for the old logprobs, to the experts that the engine selected during generation.
    Engines return the routes with every sample. Replaces `algo.use_routing_replay`. Needs a model with experts.
    """


def policy_loss_of(algo: AlgoConfig) -> PolicyLossName:
    """Loss of `algo.loss_type=policy_loss`: `algo.policy_loss`, or the default of the estimator."""
    return algo.policy_loss or LOSS_OF_ESTIMATOR.get(algo.advantage_estimator, PolicyLossName.clip)


def compares_policies(algo: AlgoConfig) -> bool:
    """Whether old logprobs, advantages and, if enabled, reference logprobs are computed."""
    is_custom = algo.loss_type == LossType.custom_loss and algo.compute_advantages_and_returns
    return algo.loss_type == LossType.policy_loss or is_custom


def centres_rewards(algo: AlgoConfig) -> bool:
    """Whether `algo.advantage_estimator` compares rewards within a group."""
    is_optional = algo.advantage_estimator in GROUP_CENTRED
    return algo.advantage_estimator in ALWAYS_CENTRED or (is_optional and algo.rewards_normalization)


def learns_from_differences(algo: AlgoConfig) -> bool:
    """Whether a group whose rewards are all equal has advantages of 0. gdpo compares several rewards separately."""
    is_built_in = compares_policies(algo) and algo.custom_advantage_function_path is None
    return is_built_in and centres_rewards(algo) and algo.advantage_estimator != AdvantageEstimator.gdpo


def uses_teacher(algo: AlgoConfig) -> bool:
    """Whether there is a teacher, for on-policy distillation: a model of the trainer or a server."""
    return compares_policies(algo) and algo.opd_kl_coef > 0


def has_teacher_loss(algo: AlgoConfig) -> bool:
    """Whether the loss has the divergence from the teacher, which reads the logits of the policy."""
    return uses_teacher(algo) and algo.opd_kl != OpdKl.sampled


def uses_critic(algo: AlgoConfig) -> bool:
    """Whether a value model is trained: for ppo, unless the user computes the advantages."""
    is_ppo = algo.advantage_estimator == AdvantageEstimator.ppo
    return is_ppo and compares_policies(algo) and algo.custom_advantage_function_path is None


def uses_reference(algo: AlgoConfig) -> bool:
    """Whether a reference model is loaded, for a KL loss or a KL penalty in the rewards."""
    return compares_policies(algo) and (algo.use_kl_loss or algo.kl_coef > 0)
