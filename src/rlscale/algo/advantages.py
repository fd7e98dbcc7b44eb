"""Advantage estimators: rewards of a rollout to an advantage per token.

A new estimator is a function from `AdvantageInputs` to `Advantages`, an entry of `ESTIMATORS`, and a member of the enum
of `algo.advantage_estimator` in the config. What it needs beyond the present inputs becomes an optional field of
`AdvantageInputs`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout, at_least_float32, check_shape, check_vectors, zero_masked
from rlscale.algo.sequences import TrainableTokens, discounted_sums

STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """A whole rollout before training. An estimator reads the fields that it needs.

    verl names: rewards_S is the sum of `token_level_rewards`, group_ids_S `index` (the prompt's uid), values_T
    `values`. slime names: `rewards`, `values`; kl_T is `kl`.
    """

    rewards_S: Tensor  # [S] float
    group_ids_S: Tensor  # [S] int64, any values; samples of one prompt share one
    layout: TokenLayout
    normalize_rewards: bool = True  # False: the raw reward replaces the group-centred one
    divide_by_std: bool = True  # False: Dr.GRPO (arXiv:2503.20783)
    batch_std: bool = False  # divide by the standard deviation of all rewards instead of the group's
    named_rewards_SK: Tensor | None = None  # [S, K] the rewards by kind, for gdpo; None: `rewards_S` alone
    reward_weights_K: Tensor | None = None  # [K] weight of each kind; None: 1
    kl_T: Tensor | None = None  # [T] KL(old policy, reference) at each token, no gradient; None: 0
    kl_coef: float = 0.0  # weight of the KL in the rewards
    values_T: Tensor | None = None  # [T] critic's estimate before each token; None: no critic
    gamma: float = 1.0  # discount per trainable token
    lambd: float = 1.0  # lambda of GAE
    lambd_critic: float | None = None  # lambda of the returns, the targets of the critic; None: `lambd`
    lambd_alpha: float | None = None  # lambda of the advantages is 1 - 1 / (alpha * length); None: `lambd`

    def __post_init__(self) -> None:
        check_shape("rewards_S", self.rewards_S, (self.layout.num_samples,))
        check_shape("group_ids_S", self.group_ids_S, (self.layout.num_samples,))
        if self.named_rewards_SK is not None and self.named_rewards_SK.shape[:-1] != self.rewards_S.shape:
            shape = tuple(self.named_rewards_SK.shape)
            raise ValueError(f"named_rewards_SK must have one row per sample, got shape {shape}")
        for name in ("kl_T", "values_T"):
            column = getattr(self, name)
            if column is not None:
                check_vectors(mask_T=self.layout.mask_T, **{name: column})


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Result of an estimator; exactly 0 at every token that is not trainable."""

    advantages_T: Tensor  # [T] float, no gradient
    returns_T: Tensor | None = None  # [T] targets of a critic; None for estimators without one


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """Entry of `ESTIMATORS`: the function, its paper, and the policy loss that goes with it by default."""

    compute: Callable[[AdvantageInputs], Advantages]
    paper: str
    policy_loss: str = "clip"  # key of `losses.POLICY_LOSSES`


def normalize_by_group(rewards_S: Tensor, *, group_ids_S: Tensor, divide_by_std: bool) -> Tensor:
    """Rewards relative to their own group: r - mean(group), and / (std(group) + 1e-6) with `divide_by_std`.

    The standard deviation is the unbiased one (n - 1). GRPO, arXiv:2402.03300; without the division Dr.GRPO,
    arXiv:2503.20783. Groups may have different sizes and any order. A group of one, and a group whose rewards are all
    equal, gives exactly 0 (verl keeps the reward of a group of one). verl: `norm_adv_by_std_in_grpo`. TRL:
    `scale_rewards="group"` or `"none"`. slime: `--disable-grpo-std-normalization`.

    Args:
        rewards_S: one reward per sample. [S]
        group_ids_S: the group of each sample, any integers. [S]
        divide_by_std: also divide by the group's standard deviation.

    Returns:
        The normalised rewards. [S]
    """
    check_vectors(rewards_S=rewards_S, group_ids_S=group_ids_S)
    rewards_S = at_least_float32(rewards_S)
    groups_S: Tensor
    sizes_G: Tensor
    _, groups_S, sizes_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    zeros_G = torch.zeros(len(sizes_G), dtype=rewards_S.dtype, device=rewards_S.device)
    # Measured from the smallest reward of the group, so that equal rewards give 0 and not the rounding error of their
    # mean, which the division by (0 + 1e-6) would amplify.
    origin_G = zeros_G.scatter_reduce(0, groups_S, rewards_S, reduce="amin", include_self=False)
    shifted_S = rewards_S - origin_G[groups_S]
    mean_G = zeros_G.index_add(0, groups_S, shifted_S) / sizes_G
    centred_S = shifted_S - mean_G[groups_S]
    if not divide_by_std:
        return centred_S
    variance_G = zeros_G.index_add(0, groups_S, centred_S.square()) / (sizes_G - 1).clamp(min=1)
    return centred_S / (variance_G.sqrt()[groups_S] + STD_EPSILON)


def batch_std(rewards_S: Tensor) -> Tensor:
    """Unbiased standard deviation of all rewards of the rollout, a scalar; 0 for fewer than two.

    Divided by it instead of the group's deviation, prompts keep their relative weights: one with nearly equal rewards
    does not get as large advantages as one with mixed ones (Lite PPO, arXiv:2508.08221). TRL: `scale_rewards="batch"`,
    with 1e-4 in place of 1e-6.

    Args:
        rewards_S: one reward per sample. [S]
    """
    check_vectors(rewards_S=rewards_S)
    rewards_S = at_least_float32(rewards_S)
    # One group of all samples: its rewards are centred without rounding where they are equal.
    centred_S = normalize_by_group(rewards_S, group_ids_S=torch.zeros_like(rewards_S), divide_by_std=False)
    return (centred_S.square().sum() / max(len(rewards_S) - 1, 1)).sqrt()


def leave_one_out(scores_S: Tensor, *, group_ids_S: Tensor) -> Tensor:
    """s_i minus the mean of the other scores of its group; 0 in a group of one. [S]

    RLOO, arXiv:2402.14740. Computed as (s_i - mean) n / (n - 1), which is the same number. verl:
    `compute_rloo_outcome_advantage`. TRL: `RLOOTrainer`.

    Args:
        scores_S: one score per sample. [S]
        group_ids_S: the group of each sample, any integers, groups of any size. [S]
    """
    check_vectors(scores_S=scores_S, group_ids_S=group_ids_S)
    centred_S = normalize_by_group(scores_S, group_ids_S=group_ids_S, divide_by_std=False)
    groups_S: Tensor
    sizes_G: Tensor
    _, groups_S, sizes_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    sizes_S = sizes_G[groups_S]
    return centred_S * (sizes_S / (sizes_S - 1).clamp(min=1)).to(centred_S.dtype)


def gae(
    rewards_T: Tensor, *, values_T: Tensor, layout: TokenLayout, gamma: float, lambd: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns (GAE, arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, R_t = A_t + V_t. t + 1 is the next
    trainable token: gamma and lambda count trainable tokens, and tool output between two turns is skipped. V is 0
    after the last one, for truncated responses too. verl: `compute_gae_advantage_return`, which also whitens A. slime:
    `vanilla_gae`, `chunked_gae`. TRL: `PPOTrainer`, with `gamma` and `lam`.

    Args:
        rewards_T: token rewards. [T]
        values_T: V before each token. [T]
        layout: samples and trainable tokens.
        gamma: within [0, 1].
        lambd: within [0, 1], the same for all samples, or one of each sample. [S]

    Returns:
        A and R without gradient, 0 where not trainable. [T], [T]
    """
    check_vectors(mask_T=layout.mask_T, rewards_T=rewards_T, values_T=values_T)
    values_T = zero_masked(at_least_float32(values_T.detach()), mask_T=layout.mask_T)
    rewards_T = zero_masked(rewards_T.detach().to(values_T.dtype), mask_T=layout.mask_T)
    tokens = TrainableTokens.from_layout(layout)
    # V_{t+1}: gathered to the dense row of trainable tokens, shifted there, and scattered back.
    next_T = values_T.new_zeros(values_T.shape)
    next_T[tokens.rows_N] = tokens.next_values(values_T[tokens.rows_N])
    deltas_T = rewards_T + gamma * next_T - values_T
    advantages_T = discounted_sums(deltas_T, layout=layout, decay=gamma * lambd)
    return advantages_T, advantages_T + values_T


def length_adaptive_lambda(layout: TokenLayout, *, alpha: float) -> Tensor:
    """Lambda of each sample: 1 - 1 / (alpha * l) for l trainable tokens, at least 0 (VAPO, arXiv:2504.05118).

    With a constant lambda the reward at the end of a long response reaches its first tokens with weight lambda^l, close
    to 0; here the weights of all terms of GAE add up to about alpha * l, a fixed share of the response. verl
    (`algorithm.lam`), TRL (`lam`) and slime (`--lambd`) have a constant.

    Args:
        layout: samples and trainable tokens.
        alpha: above 0; 0.05 in the paper.

    Returns:
        Within [0, 1), float32. [S]
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    return (1 - 1 / (alpha * layout.counts_per_sample().clamp(min=1))).clamp(min=0.0)


def kl_penalty(inputs: AdvantageInputs) -> Tensor:
    """-kl_coef kl_t at trainable tokens, 0 elsewhere; 0 everywhere without a reference. [T]

    verl: `algorithm.use_kl_in_reward`. slime: `--kl-coef`. TRL: `kl_coef` of `PPOConfig`.
    """
    mask_T = inputs.layout.mask_T
    if inputs.kl_T is None or not inputs.kl_coef:
        return torch.zeros(mask_T.shape, dtype=at_least_float32(inputs.rewards_S).dtype, device=mask_T.device)
    return -inputs.kl_coef * zero_masked(at_least_float32(inputs.kl_T.detach()), mask_T=mask_T)


def token_rewards(inputs: AdvantageInputs) -> Tensor:
    """r_t = -kl_coef kl_t, plus the sample's reward at its last trainable token; 0 where not trainable. [T]

    InstructGPT, arXiv:2203.02155. verl: `token_level_rewards`.
    """
    rewards_T = kl_penalty(inputs)
    tokens = TrainableTokens.from_layout(inputs.layout)
    samples, last = tokens.last_per_sample()
    return rewards_T.index_add(0, tokens.rows_N[last], inputs.rewards_S[samples].to(rewards_T.dtype))


def group_relative(inputs: AdvantageInputs) -> Advantages:
    """A_t = the sample's group-normalised reward, the same for all its trainable tokens (GRPO, arXiv:2402.03300).

    verl: `algorithm.adv_estimator=grpo`. slime: `--advantage-estimator grpo`, `gspo` or `cispo`. TRL: `GRPOTrainer`.
    """
    layout = inputs.layout
    return Advantages(advantages_T=zero_masked(layout.spread(_group_scores(inputs)), mask_T=layout.mask_T))


def _group_scores(inputs: AdvantageInputs) -> Tensor:
    """Rewards relative to their group, scaled as the inputs say. [S]"""
    rewards_S = at_least_float32(inputs.rewards_S)
    if not inputs.normalize_rewards:
        return rewards_S
    by_group = inputs.divide_by_std and not inputs.batch_std
    scores_S = normalize_by_group(rewards_S, group_ids_S=inputs.group_ids_S, divide_by_std=by_group)
    if inputs.divide_by_std and inputs.batch_std:
        scores_S = scores_S / (batch_std(rewards_S) + STD_EPSILON)
    return scores_S


def gpg(inputs: AdvantageInputs) -> Advantages:
    """A_t = a (r - mean of the group), with a = S / number of samples in groups of unequal rewards (arXiv:2504.02546).

    Group Policy Gradient: the factor makes up for groups whose rewards are all equal, which add no gradient but count
    in the mean of the loss; 1 if all groups are such. With `divide_by_std` also / (std + 1e-6). Its loss is REINFORCE.
    verl: `algorithm.adv_estimator=gpg`, which counts the rewards that are not 0 instead.
    """
    layout, scores_S = inputs.layout, _group_scores(inputs)
    groups_S: Tensor
    sizes_G: Tensor
    _, groups_S, sizes_G = torch.unique(inputs.group_ids_S, return_inverse=True, return_counts=True)
    low_G = torch.zeros_like(sizes_G, dtype=scores_S.dtype)
    high_G = low_G.scatter_reduce(0, groups_S, scores_S, reduce="amax", include_self=False)
    low_G = low_G.scatter_reduce(0, groups_S, scores_S, reduce="amin", include_self=False)
    num_unequal = int(sizes_G[high_G > low_G].sum())
    factor = len(scores_S) / num_unequal if num_unequal else 1.0
    return Advantages(advantages_T=zero_masked(layout.spread(factor * scores_S), mask_T=layout.mask_T))


def gdpo(inputs: AdvantageInputs) -> Advantages:
    """A_t = normalised over the batch: sum over k of w_k (r_k - mean(group)) / (std(group) + 1e-6) (arXiv:2601.05242).

    Group reward-Decoupled normalisation Policy Optimization: each kind of reward is normalised within the group before
    the sum, so that none of them drowns in the scale of another, and the sum once over all samples of the rollout:
    (x - mean) / (std + 1e-6). Without named rewards k is the one reward. TRL:
    `multi_objective_aggregation="normalize_then_sum"`. verl: `algorithm.adv_estimator=gdpo`, which normalises the sum
    over tokens.
    """
    layout, rewards_SK = inputs.layout, inputs.named_rewards_SK
    if rewards_SK is None:
        rewards_SK = inputs.rewards_S[:, None]
    scores_SK = torch.stack(
        [
            normalize_by_group(rewards_S, group_ids_S=inputs.group_ids_S, divide_by_std=inputs.divide_by_std)
            for rewards_S in rewards_SK.unbind(dim=1)
        ],
        dim=1,
    )
    if inputs.reward_weights_K is not None:
        check_shape("reward_weights_K", inputs.reward_weights_K, tuple(rewards_SK.shape[1:]))
        scores_SK = scores_SK * inputs.reward_weights_K.to(scores_SK.dtype)
    scores_S = scores_SK.sum(dim=1)
    # One group of all samples.
    one_S = torch.zeros_like(inputs.group_ids_S)
    scores_S = normalize_by_group(scores_S, group_ids_S=one_S, divide_by_std=True)
    return Advantages(advantages_T=zero_masked(layout.spread(scores_S), mask_T=layout.mask_T))


def rloo(inputs: AdvantageInputs) -> Advantages:
    """A_t = leave-one-out of (reward - kl_coef sum_t kl_t), the same for all trainable tokens (arXiv:2402.14740).

    verl: `algorithm.adv_estimator=rloo`. TRL: `RLOOTrainer`. slime has none.
    """
    layout = inputs.layout
    scores_S = at_least_float32(inputs.rewards_S) + layout.sum_per_sample(kl_penalty(inputs))
    scores_S = leave_one_out(scores_S, group_ids_S=inputs.group_ids_S)
    return Advantages(advantages_T=zero_masked(layout.spread(scores_S), mask_T=layout.mask_T))


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """A_t = sum over the trainable tokens t' >= t of gamma^(t' - t) r_t' (REINFORCE++, arXiv:2501.03262).

    r_t = -kl_coef kl_t, plus the reward at the last trainable token; t counts trainable tokens. Whiten it over the
    rollout, which replaces a baseline. verl: `algorithm.adv_estimator=reinforce_plus_plus`. slime:
    `get_reinforce_plus_plus_returns`.
    """
    returns_T = discounted_sums(token_rewards(inputs), layout=inputs.layout, decay=inputs.gamma)
    return Advantages(advantages_T=returns_T, returns_T=returns_T)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """A_t = (reward - mean of the group) - kl_coef kl_t at trainable tokens (REINFORCE++-baseline, arXiv:2501.03262).

    No division by the group's standard deviation. Whiten it over the rollout. verl:
    `algorithm.adv_estimator=reinforce_plus_plus_baseline`. slime: `get_reinforce_plus_plus_baseline_advantages`.
    """
    layout = inputs.layout
    scores_S = at_least_float32(inputs.rewards_S)
    if inputs.normalize_rewards:
        scores_S = normalize_by_group(scores_S, group_ids_S=inputs.group_ids_S, divide_by_std=False)
    return Advantages(
        advantages_T=zero_masked(layout.spread(scores_S), mask_T=layout.mask_T) + kl_penalty(inputs),
    )


def ppo(inputs: AdvantageInputs) -> Advantages:
    """GAE of r_t = -kl_coef kl_t, plus the reward at the last trainable token (PPO, arXiv:1707.06347).

    VAPO (arXiv:2504.05118) has two lambdas: `lambd_critic` for the returns R = A + V that the critic learns, and
    `lambd_alpha` for a lambda of the advantages that depends on the length (`length_adaptive_lambda`). verl:
    `algorithm.adv_estimator=gae`. slime: `--advantage-estimator ppo`. TRL: `PPOTrainer`.
    """
    if inputs.values_T is None:
        raise ValueError("values_T must be given for ppo, got None")
    layout, gamma, rewards_T = inputs.layout, inputs.gamma, token_rewards(inputs)
    lambd: float | Tensor = inputs.lambd
    if inputs.lambd_alpha is not None:
        lambd = length_adaptive_lambda(layout, alpha=inputs.lambd_alpha)
    advantages_T, returns_T = gae(rewards_T, values_T=inputs.values_T, layout=layout, gamma=gamma, lambd=lambd)
    of_critic = inputs.lambd if inputs.lambd_critic is None else inputs.lambd_critic
    if isinstance(lambd, Tensor) or of_critic != lambd:
        _, returns_T = gae(rewards_T, values_T=inputs.values_T, layout=layout, gamma=gamma, lambd=of_critic)
    return Advantages(advantages_T=advantages_T, returns_T=returns_T)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(compute=group_relative, paper="arXiv:2402.03300"),
    "gspo": Estimator(compute=group_relative, paper="arXiv:2507.18071", policy_loss="gspo"),
    "cispo": Estimator(compute=group_relative, paper="arXiv:2506.13585", policy_loss="cispo"),
    "gpg": Estimator(compute=gpg, paper="arXiv:2504.02546", policy_loss="reinforce"),
    "gdpo": Estimator(compute=gdpo, paper="arXiv:2601.05242"),
    "rloo": Estimator(compute=rloo, paper="arXiv:2402.14740"),
    "reinforce_plus_plus": Estimator(compute=reinforce_plus_plus, paper="arXiv:2501.03262"),
    "reinforce_plus_plus_baseline": Estimator(compute=reinforce_plus_plus_baseline, paper="arXiv:2501.03262"),
    "ppo": Estimator(compute=ppo, paper="arXiv:1707.06347"),
}
"""Estimators by the name in `algo.advantage_estimator`."""


def overlong_penalty(lengths_S: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment, arXiv:2503.14476, equation 13: 0 up to max_length - buffer, then linear to -1.

    verl: `overlong_buffer` of the DAPO reward manager. TRL: `get_soft_overlong_punishment`.

    Args:
        lengths_S: tokens of each response. [S]
        max_length: length at which the penalty is -1; also beyond it.
        buffer: tokens over which it grows, within [1, max_length].

    Returns:
        The term to add to the reward, within [-1, 0]. [S] float32
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be within [1, {max_length}], got {buffer}")
    return -((lengths_S - (max_length - buffer)).float() / buffer).clamp(0.0, 1.0)


def distill(advantages_T: Tensor, *, student_T: Tensor, teacher_T: Tensor, layout: TokenLayout, coef: float) -> Tensor:
    """A_t - coef (student_t - teacher_t), logprobs at trainable tokens, 0 elsewhere, without gradient. [T]

    The difference is the single-sample estimate of the reverse KL divergence from the teacher (on-policy distillation:
    MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649). Apply it before whitening. slime: `apply_opd_kl_to_advantages`,
    `--opd-kl-coef`, `teacher_log_probs`.

    Args:
        advantages_T: of any estimator. [T]
        student_T, teacher_T: logprobs of the tokens under the policy that generated them and under the teacher. [T]
        layout: samples and trainable tokens.
        coef: weight of the teacher; 0 changes nothing.
    """
    mask_T = layout.mask_T
    check_vectors(mask_T=mask_T, advantages_T=advantages_T, student_T=student_T, teacher_T=teacher_T)
    advantages_T = zero_masked(at_least_float32(advantages_T.detach()), mask_T=mask_T)
    # Masked before the subtraction: logprobs of padding may be infinite on both sides.
    student_T, teacher_T = (
        zero_masked(column.detach().to(advantages_T.dtype), mask_T=mask_T) for column in (student_T, teacher_T)
    )
    return advantages_T - coef * (student_T - teacher_T)
