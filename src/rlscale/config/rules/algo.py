"""Rules and warnings about advantage estimator, loss and off-policy corrections."""

from __future__ import annotations

from collections.abc import Callable

from rlscale.config.groups.algo import (
    ALWAYS_CENTRED,
    GROUP_CENTRED,
    WITH_RETURNS,
    WITHOUT_KL,
    AdvantageEstimator,
    AlgoConfig,
    KlType,
    LossType,
    OpdKl,
    PolicyLossName,
    TisType,
    centres_rewards,
    compares_policies,
    policy_loss_of,
    uses_reference,
    uses_teacher,
)
from rlscale.config.problems import show
from rlscale.config.rules.conditions import is_sft, keeps_old_policies, learns_conversations, resolve_decoupled_loss
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

CLIPPED = (PolicyLossName.clip, PolicyLossName.gspo, PolicyLossName.cispo)
"""Losses with a clip range."""
ONE_STEP = "with one optimiser step per rollout (batch.num_steps_per_rollout) the policy ratio is 1"


def _uses_estimator(algo: AlgoConfig) -> bool:
    """Whether `algo.advantage_estimator` computes the advantages."""
    return algo.custom_advantage_function_path is None and compares_policies(algo)


def _centres_rewards(config: RunConfig) -> bool:
    """Whether rewards are compared within a group; `reward.post_process_path` replaces `algo.rewards_normalization`."""
    algo = config.algo
    is_replaced = config.reward.post_process_path is not None and algo.advantage_estimator not in ALWAYS_CENTRED
    return centres_rewards(algo) and not is_replaced


@rule
def group_baseline_needs_two_samples(config: RunConfig) -> list[Problem]:
    """In a group of one sample, a reward minus the mean of its group is 0, and rloo has no other sample."""
    algo, name = config.algo, config.algo.advantage_estimator
    if not _centres_rewards(config) or config.batch.n_samples_per_prompt > 1 or not _uses_estimator(algo):
        return []
    if uses_teacher(algo) and name not in ALWAYS_CENTRED:
        return []  # its logprobs are added to the advantages
    fix = "all advantages would be 0; set e.g. batch.n_samples_per_prompt=8"
    # rloo and gdpo have no baseline without other samples, whatever the normalisation.
    fix += "" if name in ALWAYS_CENTRED else ", or algo.rewards_normalization=false"
    rule = f"be at least 2 with algo.advantage_estimator={name}"
    return [Problem(path="batch.n_samples_per_prompt", rule=rule, value="1", fix=fix)]


@rule
def estimator_supports_kl_coef(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.kl_coef or algo.advantage_estimator not in WITHOUT_KL or not _uses_estimator(algo):
        return []
    rule = f"be 0 with algo.advantage_estimator={algo.advantage_estimator}"
    fix = "this estimator has no KL penalty; use algo.use_kl_loss and algo.kl_loss_coef"
    return [Problem(path="algo.kl_coef", rule=rule, value=show(algo.kl_coef), fix=fix)]


@rule
def one_kl_penalty(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.kl_coef or not algo.kl_loss_coef:
        return []
    rule = f"be 0 with algo.kl_loss_coef={algo.kl_loss_coef:g}"
    fix = "keep one of them; both penalise the distance to the reference"
    return [Problem(path="algo.kl_coef", rule=rule, value=show(algo.kl_coef), fix=fix)]


@rule
def reinforce_plus_plus_whitens_advantages(config: RunConfig) -> list[Problem]:
    algo = config.algo
    whitened = {AdvantageEstimator.reinforce_plus_plus, AdvantageEstimator.reinforce_plus_plus_baseline}
    if algo.advantage_estimator not in whitened or algo.normalize_advantages or not _uses_estimator(algo):
        return []
    rule = f"be true with algo.advantage_estimator={algo.advantage_estimator}"
    fix = f"set it, or choose algo={algo.advantage_estimator}, which sets it"
    return [Problem(path="algo.normalize_advantages", rule=rule, value="false", fix=fix)]


@rule
def custom_loss_is_set(config: RunConfig) -> list[Problem]:
    if config.algo.loss_type != LossType.custom_loss or config.algo.custom_loss_function_path is not None:
        return []
    rule, fix = "be set with algo.loss_type=custom_loss", "set it to <package.module:name>"
    return [Problem(path="algo.custom_loss_function_path", rule=rule, value="null", fix=fix)]


@rule
def supervised_training_has_one_pass(config: RunConfig) -> list[Problem]:
    epochs = config.algo.ppo_epochs
    if not is_sft(config) or epochs == 1:
        return []
    rule, fix = "be 1 with algo.loss_type=sft_loss", f"remove it, and set data.num_epoch={epochs}"
    return [Problem(path="algo.ppo_epochs", rule=rule, value=show(epochs), fix=fix)]


@rule
def policy_loss_has_advantages(config: RunConfig) -> list[Problem]:
    if config.algo.loss_type != LossType.policy_loss or config.algo.compute_advantages_and_returns:
        return []
    rule, fix = (
        "be true with algo.loss_type=policy_loss",
        "remove it, or choose algo=sft or algo.loss_type=custom_loss",
    )
    return [Problem(path="algo.compute_advantages_and_returns", rule=rule, value="false", fix=fix)]


@rule
def one_loss_reduction(config: RunConfig) -> list[Problem]:
    if not (config.algo.calculate_per_token_loss and config.algo.divide_by_max_response_len):
        return []
    rule, fix = "be false with algo.calculate_per_token_loss", "keep one of them; each defines the average of the loss"
    return [Problem(path="algo.divide_by_max_response_len", rule=rule, value="true", fix=fix)]


@rule
def overlong_buffer_fits(config: RunConfig) -> list[Problem]:
    buffer, longest = config.algo.overlong_buffer_len, config.rollout.max_response_len
    if buffer is None or buffer <= longest:
        return []
    rule = f"be at most rollout.max_response_len={longest}"
    fix = f"set it to {longest} or less; the buffer is the end of the longest response"
    return [Problem(path="algo.overlong_buffer_len", rule=rule, value=show(buffer), fix=fix)]


@rule
def supervised_training_has_labels(config: RunConfig) -> list[Problem]:
    if not is_sft(config):
        return []
    problems = []
    number = config.batch.n_samples_per_prompt
    if number != 1:
        rule, fix = "be 1 with algo.loss_type=sft_loss", "set batch.n_samples_per_prompt=1; a prompt has one label"
        problems.append(Problem(path="batch.n_samples_per_prompt", rule=rule, value=show(number), fix=fix))
    data = config.data
    if data.label_key is None and data.data_source_path is None and not learns_conversations(config):
        rule = "be set with algo.loss_type=sft_loss"
        fix = "set it to the field with the answer, or set data.apply_chat_template=true to learn whole conversations"
        problems.append(Problem(path="data.label_key", rule=rule, value="null", fix=fix))
    return problems


@rule
def tis_needs_trainer_logprobs(config: RunConfig) -> list[Problem]:
    if not (config.algo.use_tis and config.algo.use_rollout_logprobs):
        return []
    rule = "be false with algo.use_rollout_logprobs"
    fix = "keep one of them; with algo.use_rollout_logprobs the ratio of trainer to engine is always 1"
    return [Problem(path="algo.use_tis", rule=rule, value="true", fix=fix)]


@rule
def decoupled_loss_excludes_other_weights(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.decoupled_loss or is_sft(config):
        return []
    fixes = {
        "use_tis": "keep one of them; both weight tokens by the ratio of trainer to engine",
        "use_rollout_logprobs": "keep one of them; algo.use_rollout_logprobs clips around the engine's policy",
    }
    return [
        Problem(path="algo.decoupled_loss", rule=f"be false with algo.{name}", value="true", fix=fix)
        for name, fix in fixes.items()
        if getattr(algo, name)
    ]


@rule
def tis_bounds_are_ordered(config: RunConfig) -> list[Problem]:
    algo, mis = config.algo, config.algo.mis
    if not algo.use_tis or algo.custom_tis_function_path is not None:
        return []
    if algo.tis_type == TisType.mis:
        pairs = [("algo.mis.low", _low_or_inverse(mis.low, algo.tis_clip), "algo.tis_clip", algo.tis_clip)]
        if mis.reject_level is not None:
            name, high = "algo.mis.reject_high", mis.reject_high
            if high is None:
                name, high = "algo.tis_clip", algo.tis_clip
            pairs.append(("algo.mis.reject_low", _low_or_inverse(mis.reject_low, high), name, high))
    else:
        pairs = [("algo.tis_clip_low", algo.tis_clip_low, "algo.tis_clip", algo.tis_clip)]
    return [
        Problem(
            path=path, rule=f"be at most {high_path}={high:g}", value=f"{low:g}", fix="lower it, or raise the other"
        )
        for path, low, high_path, high in pairs
        if low > high
    ]


def _low_or_inverse(low: float | None, high: float) -> float:
    """Lower bound of a ratio; the default is the inverse of the upper bound."""
    return 1 / high if low is None else low


def warn_algo(config: RunConfig) -> list[str]:
    """Warnings about settings of `algo` that are allowed and rarely intended."""
    algo = config.algo
    warnings = []
    if compares_policies(algo) and algo.use_kl_loss and algo.kl_loss_coef > 0 and algo.kl_loss_type == KlType.k1:
        warnings.append("algo.kl_loss_type=k1 has an expected gradient of 0 as a loss; use k2 or low_var_kl")
    if algo.loss_type != LossType.policy_loss:
        return warnings
    loss = policy_loss_of(algo)
    is_cispo = loss == PolicyLossName.cispo
    # cispo clips the importance weight, usually with a larger upper bound.
    high = algo.eps_clip_high
    if high is not None and high < algo.eps_clip and loss in CLIPPED and not is_cispo:
        warnings.append(f"algo.eps_clip_high={high:g} is below algo.eps_clip={algo.eps_clip:g}; it is usually above")
    if is_cispo and algo.eps_clip < 1:
        warnings.append(f"algo.eps_clip={algo.eps_clip:g} is a lower bound of the cispo weight; use 1.0 for no bound")
    if loss == PolicyLossName.gspo:
        warnings += [
            f"algo.{name} changes gspo from its paper, which averages over samples"
            for name in ("calculate_per_token_loss", "divide_by_max_response_len")
            if getattr(algo, name)
        ]
    averages = not (algo.calculate_per_token_loss or algo.divide_by_max_response_len)
    if loss == PolicyLossName.gspo and averages and _ratio_is_one(config):
        warnings.append(f"gspo trains as grpo does: {ONE_STEP}")
    if algo.opsm_delta is not None and _has_one_step(config) and config.rollout.max_staleness == 0:
        warnings.append(
            "algo.opsm_delta hardly masks any sample: with one optimiser step per rollout and rollout.max_staleness=0 "
            "the trained policy is the one that generated the samples"
        )
    return warnings


def _has_one_step(config: RunConfig) -> bool:
    batch = config.batch
    if config.algo.ppo_epochs > 1:
        return False
    if batch.num_steps_per_rollout is not None:
        return batch.num_steps_per_rollout == 1
    # Rules run before the resolve step, so the sizes may be unset.
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    return batch.global_batch_size is None or batch.global_batch_size >= samples


def _ratio_is_one(config: RunConfig) -> bool:
    """Whether the policy of each step is the one whose logprobs are the old ones, so that no clip range has an effect.

    It is not where the old ones come from the engine, from kept weights, or from before other steps.
    """
    return _has_one_step(config) and not config.algo.use_rollout_logprobs and not keeps_old_policies(config)


def _algo(*names: str) -> tuple[str, ...]:
    return tuple(f"algo.{name}" for name in names)


def _estimator_not_in(*names: AdvantageEstimator) -> Callable[[RunConfig], bool]:
    return lambda config: config.algo.advantage_estimator not in names


POLICY_LOSS_KEYS = _algo(
    "policy_loss",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
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
ADVANTAGE_KEYS = _algo(
    "advantage_estimator",
    "custom_advantage_function_path",
    "rewards_normalization",
    "grpo_std_normalization",
    "scale_rewards",
    "normalize_advantages",
    "baseline",
    "gamma",
    "lambd",
    "lambd_critic",
    "lambd_alpha",
    "overlong_buffer_len",
    "overlong_penalty",
    "kl_coef",
    "use_kl_loss",
    "use_rollout_logprobs",
    "use_rollout_entropy",
)

IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=_algo("kl_loss_coef", "use_unbiased_kl"),
        when=lambda config: not config.algo.use_kl_loss,
        why="algo.use_kl_loss is false",
    ),
    IgnoredKey(
        names=_algo("kl_loss_type"),
        when=lambda config: not uses_reference(config.algo),
        why="there is no reference model: neither algo.use_kl_loss nor algo.kl_coef is set",
    ),
    IgnoredKey(
        names=_algo("decoupled_weight_max"),
        when=lambda config: not resolve_decoupled_loss(config)[0],
        why="algo.decoupled_loss is off",
    ),
    IgnoredKey(
        names=POLICY_LOSS_KEYS,
        when=lambda config: config.algo.loss_type != LossType.policy_loss,
        why="algo.loss_type is not policy_loss",
    ),
    IgnoredKey(
        names=(*ADVANTAGE_KEYS, "train.rollout_data_postprocess_path", "train.convert_samples_path"),
        when=lambda config: not compares_policies(config.algo),
        why="no advantages are computed: algo.loss_type is sft_loss, or algo.compute_advantages_and_returns is false",
    ),
    IgnoredKey(
        names=_algo("compute_advantages_and_returns", "overlong_filter"),
        when=is_sft,
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
        why="algo.custom_tis_function_path is set and takes precedence",
    ),
    IgnoredKey(
        names=_algo("tis_clip_low"),
        when=lambda config: config.algo.tis_type == TisType.mis,
        why="algo.tis_type=mis uses algo.mis.low instead",
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
        names=_algo(
            "rewards_normalization",
            "grpo_std_normalization",
            "scale_rewards",
            "gamma",
            "lambd",
            "lambd_critic",
            "lambd_alpha",
            "kl_coef",
        ),
        when=lambda config: config.algo.custom_advantage_function_path is not None,
        why="algo.custom_advantage_function_path is set and takes precedence",
    ),
    IgnoredKey(
        names=_algo("calculate_per_token_loss", "divide_by_max_response_len"),
        when=lambda config: config.algo.custom_reducer_function_path is not None,
        why="algo.custom_reducer_function_path is set and takes precedence",
    ),
    IgnoredKey(
        names=_algo("grpo_std_normalization", "scale_rewards"),
        when=lambda config: (
            not config.algo.rewards_normalization and config.algo.advantage_estimator not in ALWAYS_CENTRED
        ),
        why="algo.rewards_normalization is false",
    ),
    IgnoredKey(
        names=_algo("scale_rewards"),
        when=lambda config: not config.algo.grpo_std_normalization,
        why="algo.grpo_std_normalization is false",
    ),
    IgnoredKey(
        names=_algo("scale_rewards"),
        when=_estimator_not_in(*WITHOUT_KL - {AdvantageEstimator.gdpo}),
        why="algo.advantage_estimator does not choose between standard deviations",
    ),
    IgnoredKey(
        names=_algo("grpo_std_normalization"),
        when=_estimator_not_in(*WITHOUT_KL),
        why="algo.advantage_estimator does not divide by a standard deviation",
    ),
    IgnoredKey(
        names=_algo("rewards_normalization"),
        when=_estimator_not_in(*GROUP_CENTRED),
        why="algo.advantage_estimator does not use it",
    ),
    IgnoredKey(
        names=_algo("baseline"),
        when=lambda config: _uses_estimator(config.algo) and _centres_rewards(config),
        why="algo.advantage_estimator compares rewards within a group, where a constant cancels",
    ),
    IgnoredKey(
        names=_algo("gamma"),
        when=_estimator_not_in(*WITH_RETURNS),
        why="algo.advantage_estimator does not compute returns",
    ),
    IgnoredKey(
        names=_algo("lambd", "lambd_critic", "lambd_alpha"),
        when=_estimator_not_in(AdvantageEstimator.ppo),
        why="only ppo uses GAE",
    ),
    IgnoredKey(
        names=_algo("lambd"),
        when=lambda config: config.algo.lambd_alpha is not None and config.algo.lambd_critic is not None,
        why="algo.lambd_alpha and algo.lambd_critic replace it",
    ),
    IgnoredKey(
        names=_algo("eps_clip_c"),
        when=lambda config: policy_loss_of(config.algo) == PolicyLossName.cispo,
        why="cispo has no dual clip",
    ),
    IgnoredKey(
        names=_algo("eps_clip", "eps_clip_high", "eps_clip_c"),
        when=lambda config: policy_loss_of(config.algo) not in CLIPPED,
        why="the policy loss has no clip range",
    ),
    IgnoredKey(
        names=_algo("eps_clip", "eps_clip_high", "eps_clip_c"),
        when=_ratio_is_one,
        why=ONE_STEP,
    ),
    IgnoredKey(
        names=_algo("sapo_temperature_pos", "sapo_temperature_neg"),
        when=lambda config: policy_loss_of(config.algo) != PolicyLossName.sapo,
        why="algo.policy_loss is not sapo",
    ),
    IgnoredKey(
        names=_algo("overlong_penalty"),
        when=lambda config: config.algo.overlong_buffer_len is None,
        why="algo.overlong_buffer_len is not set",
    ),
    IgnoredKey(
        names=_algo("opd_kl"),
        when=lambda config: not uses_teacher(config.algo),
        why="there is no distillation: algo.opd_kl_coef is 0, or no advantages are computed",
    ),
    IgnoredKey(
        names=_algo("opd_top_k"),
        when=lambda config: config.algo.opd_kl != OpdKl.top_k,
        why="algo.opd_kl is not top_k",
    ),
    IgnoredKey(
        names=_algo("opd_direction"),
        when=lambda config: config.algo.opd_kl == OpdKl.sampled,
        why="algo.opd_kl is sampled",
    ),
    IgnoredKey(
        names=_algo("opd_kl_coef"),
        when=lambda config: not compares_policies(config.algo),
        why="no advantages are computed, so no policies are compared",
    ),
    IgnoredKey(
        names=_algo("rewards_normalization", "grpo_std_normalization", "scale_rewards"),
        when=lambda config: (
            config.reward.post_process_path is not None and config.algo.advantage_estimator != AdvantageEstimator.gdpo
        ),
        why="reward.post_process_path is set and takes precedence",
    ),
    IgnoredKey(
        names=_algo("use_routing_replay"),
        when=lambda config: config.algo.use_rollout_logprobs or not compares_policies(config.algo),
        why="there is no pass for old logprobs whose routes could be replayed",
    ),
    IgnoredKey(
        names=_algo("use_rollout_routing_replay"),
        when=is_sft,
        why="algo.loss_type is sft_loss, so no engine selects routes",
    ),
)
