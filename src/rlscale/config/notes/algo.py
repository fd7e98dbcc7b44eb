"""Settings of the group `algo` that have no effect, or do little good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlscale.config.groups.algo import (
    GROUP_CENTRED,
    WITH_RETURNS,
    WITHOUT_KL,
    AdvantageEstimator,
    KlType,
    LossType,
    TisType,
    compares_policies,
    uses_reference,
)
from rlscale.config.rules import uses_decoupled_loss
from rlscale.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class IgnoredKey:
    """Keys (or a group) that have no effect under a condition."""

    names: tuple[str, ...]
    when: Callable[[RunConfig], bool]
    why: str


def _algo(*names: str) -> tuple[str, ...]:
    return tuple(f"algo.{name}" for name in names)


OF_THE_POLICY_LOSS = _algo(
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "use_tis",
    "tis_type",
    "tis_clip",
    "tis_clip_low",
    "custom_tis_function_path",
    "mis",
    "decoupled_loss",
    "opsm_delta",
)
OF_ADVANTAGES = _algo(
    "advantage_estimator",
    "custom_advantage_function_path",
    "rewards_normalization",
    "grpo_std_normalization",
    "normalize_advantages",
    "baseline",
    "gamma",
    "lambd",
    "overlong_buffer_len",
    "overlong_penalty",
    "kl_coef",
    "use_kl_loss",
    "use_rollout_logprobs",
    "use_rollout_entropy",
)


def _estimator_not_in(*names: AdvantageEstimator) -> Callable[[RunConfig], bool]:
    return lambda config: config.algo.advantage_estimator not in names


def _centres_rewards(config: RunConfig) -> bool:
    algo = config.algo
    is_rloo = algo.advantage_estimator == AdvantageEstimator.rloo
    return is_rloo or (algo.advantage_estimator in GROUP_CENTRED and algo.rewards_normalization)


IGNORED_OF_ALGO: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=OF_THE_POLICY_LOSS,
        when=lambda config: config.algo.loss_type != LossType.policy_loss,
        why="algo.loss_type is not policy_loss",
    ),
    IgnoredKey(
        names=(*OF_ADVANTAGES, "train.rollout_data_postprocess_path"),
        when=lambda config: not compares_policies(config.algo),
        why="no advantages are computed: algo.loss_type is sft_loss, or algo.compute_advantages_and_returns is false",
    ),
    IgnoredKey(
        names=_algo("compute_advantages_and_returns", "overlong_filter"),
        when=lambda config: config.algo.loss_type == LossType.sft_loss,
        why="algo.loss_type is sft_loss",
    ),
    IgnoredKey(
        names=_algo("ref_update_interval"),
        when=lambda config: not uses_reference(config.algo),
        why="there is no reference model: neither algo.use_kl_loss nor algo.kl_coef is set",
    ),
    IgnoredKey(
        names=_algo("custom_loss_function_path"),
        when=lambda config: config.algo.loss_type != LossType.custom_loss,
        why="algo.loss_type is not custom_loss",
    ),
    IgnoredKey(
        names=_algo("tis_type", "tis_clip", "tis_clip_low", "custom_tis_function_path", "mis"),
        when=lambda config: not config.algo.use_tis,
        why="algo.use_tis is false",
    ),
    IgnoredKey(
        names=_algo("tis_type", "tis_clip", "tis_clip_low", "mis"),
        when=lambda config: config.algo.custom_tis_function_path is not None,
        why="algo.custom_tis_function_path is set and wins",
    ),
    IgnoredKey(
        names=_algo("tis_clip_low"),
        when=lambda config: config.algo.tis_type == TisType.mis,
        why="algo.tis_type=mis has algo.mis.low",
    ),
    IgnoredKey(
        names=_algo("mis"),
        when=lambda config: config.algo.tis_type != TisType.mis,
        why="algo.tis_type is not mis",
    ),
    IgnoredKey(
        names=_algo("mis.reject_low", "mis.reject_high"),
        when=lambda config: config.algo.mis.reject_level is None,
        why="algo.mis.reject_level is not set",
    ),
    IgnoredKey(
        names=_algo("decoupled_weight_max"),
        when=lambda config: not uses_decoupled_loss(config)[0],
        why="algo.decoupled_loss is off",
    ),
    IgnoredKey(
        names=_algo("rewards_normalization", "grpo_std_normalization", "gamma", "lambd", "kl_coef"),
        when=lambda config: config.algo.custom_advantage_function_path is not None,
        why="algo.custom_advantage_function_path is set and wins",
    ),
    IgnoredKey(
        names=_algo("calculate_per_token_loss", "divide_by_max_response_len"),
        when=lambda config: config.algo.custom_reducer_function_path is not None,
        why="algo.custom_reducer_function_path is set and wins",
    ),
    IgnoredKey(
        names=_algo("grpo_std_normalization"),
        when=lambda config: not config.algo.rewards_normalization,
        why="algo.rewards_normalization is false",
    ),
    IgnoredKey(
        names=_algo("grpo_std_normalization"),
        when=_estimator_not_in(*WITHOUT_KL),
        why="algo.advantage_estimator does not divide by a standard deviation",
    ),
    IgnoredKey(
        names=_algo("rewards_normalization"),
        when=_estimator_not_in(*GROUP_CENTRED),
        why="algo.advantage_estimator does not centre rewards by it",
    ),
    IgnoredKey(
        names=_algo("baseline"),
        when=_centres_rewards,
        why="algo.advantage_estimator compares the rewards of a group, where it cancels",
    ),
    IgnoredKey(
        names=_algo("gamma"),
        when=_estimator_not_in(*WITH_RETURNS),
        why="algo.advantage_estimator knows no returns",
    ),
    IgnoredKey(
        names=_algo("lambd"),
        when=_estimator_not_in(AdvantageEstimator.ppo),
        why="only ppo estimates advantages by GAE",
    ),
    IgnoredKey(
        names=_algo("eps_clip_c"),
        when=lambda config: config.algo.advantage_estimator == AdvantageEstimator.cispo,
        why="cispo has no dual clip",
    ),
    IgnoredKey(
        names=_algo("overlong_penalty"),
        when=lambda config: config.algo.overlong_buffer_len is None,
        why="algo.overlong_buffer_len is not set",
    ),
)


def warn_algo(config: RunConfig) -> list[str]:
    """Settings of `algo` that are allowed and hardly ever meant."""
    algo = config.algo
    lines = []
    if compares_policies(algo) and algo.use_kl_loss and algo.kl_loss_coef > 0 and algo.kl_loss_type == KlType.k1:
        lines.append("algo.kl_loss_type=k1 has no gradient on average as a loss; use k2 or low_var_kl")
    if algo.loss_type != LossType.policy_loss:
        return lines
    is_cispo = algo.advantage_estimator == AdvantageEstimator.cispo
    high = algo.eps_clip_high
    if high is not None and high < algo.eps_clip and not is_cispo:
        lines.append(f"algo.eps_clip_high={high:g} is below algo.eps_clip={algo.eps_clip:g}; it usually is above")
    if is_cispo and algo.eps_clip < 1:
        lines.append(f"algo.eps_clip={algo.eps_clip:g} bounds the weight of cispo from below; use 1.0 for no bound")
    if algo.advantage_estimator == AdvantageEstimator.gspo:
        lines += [
            f"algo.{name} makes gspo differ from its paper, which averages over samples"
            for name in ("calculate_per_token_loss", "divide_by_max_response_len")
            if getattr(algo, name)
        ]
    if algo.opsm_delta is not None and _makes_one_step(config) and config.rollout.max_staleness == 0:
        lines.append(
            "algo.opsm_delta can hardly drop a sample: with one optimiser step per rollout and rollout.max_staleness=0 "
            "the policy is the one that generated"
        )
    return lines


def _makes_one_step(config: RunConfig) -> bool:
    batch = config.batch
    if batch.num_steps_per_rollout is not None:
        return batch.num_steps_per_rollout == 1
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    return batch.global_batch_size is None or batch.global_batch_size >= samples
