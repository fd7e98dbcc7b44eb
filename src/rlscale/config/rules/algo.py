"""Rules about estimator, loss and corrections."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.algo import (
    GROUP_CENTRED,
    WITHOUT_KL,
    AdvantageEstimator,
    AlgoConfig,
    LossType,
    TisType,
    compares_policies,
)
from rlscale.config.rules.rule import CONVERSATIONS, learns_conversations, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

ESTIMATES = (
    "algo.loss_type",
    "algo.advantage_estimator",
    "algo.custom_advantage_function_path",
    "algo.compute_advantages_and_returns",
)
"""Keys that say whether, and by which estimator, rewards become advantages."""


def _estimates(algo: AlgoConfig) -> bool:
    """Whether advantages come from `algo.advantage_estimator`."""
    return algo.custom_advantage_function_path is None and compares_policies(algo)


@rule(
    "algo.loss_type",
    "algo.advantage_estimator",
    "algo.rewards_normalization",
    "algo.custom_advantage_function_path",
    "algo.compute_advantages_and_returns",
    "batch.n_samples_per_prompt",
)
def groups_can_be_centred(config: RunConfig) -> list[Problem]:
    """In a group of one, a reward minus the mean of its group is 0, and rloo has no other sample to compare with."""
    algo = config.algo
    name, is_rloo = algo.advantage_estimator, algo.advantage_estimator == AdvantageEstimator.rloo
    centred = is_rloo or (name in GROUP_CENTRED and algo.rewards_normalization)
    if not centred or config.batch.n_samples_per_prompt > 1 or not _estimates(algo):
        return []
    fix = "every advantage would be 0; set e.g. batch.n_samples_per_prompt=8"
    fix += "" if is_rloo else ", or algo.rewards_normalization=false"
    rule = f"be at least 2 with algo.advantage_estimator={name}"
    return [Problem(path="batch.n_samples_per_prompt", rule=rule, value="1", fix=fix)]


@rule(*ESTIMATES, "algo.kl_coef")
def estimator_knows_the_kl_penalty(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.kl_coef or algo.advantage_estimator not in WITHOUT_KL or not _estimates(algo):
        return []
    rule = f"be 0 with algo.advantage_estimator={algo.advantage_estimator}"
    fix = "its advantages know no KL penalty; use algo.use_kl_loss and algo.kl_loss_coef"
    return [Problem(path="algo.kl_coef", rule=rule, value=show(algo.kl_coef), fix=fix)]


@rule("algo.kl_coef", "algo.kl_loss_coef")
def one_kl_penalty(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.kl_coef or not algo.kl_loss_coef:
        return []
    fix = "the policy would be held to the reference twice; keep one of them"
    rule = f"be 0 with algo.kl_loss_coef={algo.kl_loss_coef:g}"
    return [Problem(path="algo.kl_coef", rule=rule, value=show(algo.kl_coef), fix=fix)]


@rule(*ESTIMATES, "algo.normalize_advantages")
def returns_are_whitened(config: RunConfig) -> list[Problem]:
    algo = config.algo
    whitened = {AdvantageEstimator.reinforce_plus_plus, AdvantageEstimator.reinforce_plus_plus_baseline}
    if algo.advantage_estimator not in whitened or algo.normalize_advantages or not _estimates(algo):
        return []
    rule = f"be true with algo.advantage_estimator={algo.advantage_estimator}"
    fix = f"set it, or choose algo={algo.advantage_estimator}, which does"
    return [Problem(path="algo.normalize_advantages", rule=rule, value="false", fix=fix)]


@rule("algo.loss_type", "algo.custom_loss_function_path")
def custom_loss_is_named(config: RunConfig) -> list[Problem]:
    if config.algo.loss_type != LossType.custom_loss or config.algo.custom_loss_function_path is not None:
        return []
    fix = "set it to <package.module:name>"
    rule = "be set with algo.loss_type=custom_loss"
    return [Problem(path="algo.custom_loss_function_path", rule=rule, value="null", fix=fix)]


@rule("algo.loss_type", "algo.compute_advantages_and_returns")
def policy_loss_has_advantages(config: RunConfig) -> list[Problem]:
    if config.algo.loss_type != LossType.policy_loss or config.algo.compute_advantages_and_returns:
        return []
    fix = "leave it out, or choose algo=sft or algo.loss_type=custom_loss"
    rule = "be true with algo.loss_type=policy_loss"
    return [Problem(path="algo.compute_advantages_and_returns", rule=rule, value="false", fix=fix)]


@rule("algo.calculate_per_token_loss", "algo.divide_by_max_response_len")
def one_reduction(config: RunConfig) -> list[Problem]:
    if not (config.algo.calculate_per_token_loss and config.algo.divide_by_max_response_len):
        return []
    rule = "be false with algo.calculate_per_token_loss"
    fix = "they are two ways to average; keep one of them"
    return [Problem(path="algo.divide_by_max_response_len", rule=rule, value="true", fix=fix)]


@rule("algo.overlong_buffer_len", "rollout.max_response_len")
def overlong_buffer_fits(config: RunConfig) -> list[Problem]:
    buffer, longest = config.algo.overlong_buffer_len, config.rollout.max_response_len
    if buffer is None or buffer <= longest:
        return []
    rule = f"be at most rollout.max_response_len={longest}"
    fix = f"it is the last part of a response; set it to {longest} at most"
    return [Problem(path="algo.overlong_buffer_len", rule=rule, value=show(buffer), fix=fix)]


@rule("batch.n_samples_per_prompt", *CONVERSATIONS)
def supervised_training_has_labels(config: RunConfig) -> list[Problem]:
    if config.algo.loss_type != LossType.sft_loss:
        return []
    problems = []
    number = config.batch.n_samples_per_prompt
    if number != 1:
        fix = "a prompt has one label; set batch.n_samples_per_prompt=1"
        rule = "be 1 with algo.loss_type=sft_loss"
        problems.append(Problem(path="batch.n_samples_per_prompt", rule=rule, value=show(number), fix=fix))
    data = config.data
    if data.label_key is None and data.data_source_path is None and not learns_conversations(config):
        fix = "set it to the field that holds the answer, or data.apply_chat_template=true for whole conversations"
        rule = "be set with algo.loss_type=sft_loss"
        problems.append(Problem(path="data.label_key", rule=rule, value="null", fix=fix))
    return problems


@rule("algo.use_tis", "algo.use_rollout_logprobs")
def tis_needs_trainer_logprobs(config: RunConfig) -> list[Problem]:
    if not (config.algo.use_tis and config.algo.use_rollout_logprobs):
        return []
    fix = "the correction compares the two logprobs that algo.use_rollout_logprobs makes the same; keep one of them"
    return [Problem(path="algo.use_tis", rule="be false with algo.use_rollout_logprobs", value="true", fix=fix)]


@rule("algo.loss_type", "algo.decoupled_loss", "algo.use_tis", "algo.use_rollout_logprobs")
def decoupled_loss_stands_alone(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.decoupled_loss or algo.loss_type == LossType.sft_loss:
        return []
    reasons = {
        "use_tis": "both weigh by the ratio of trainer to engine, which would count twice; keep one of them",
        "use_rollout_logprobs": "it clips around the engine's policy, from which this decouples; keep one of them",
    }
    return [
        Problem(path="algo.decoupled_loss", rule=f"be false with algo.{name}", value="true", fix=fix)
        for name, fix in reasons.items()
        if getattr(algo, name)
    ]


@rule(
    "algo.use_tis",
    "algo.tis_type",
    "algo.tis_clip",
    "algo.tis_clip_low",
    "algo.custom_tis_function_path",
    "algo.mis.low",
    "algo.mis.reject_level",
    "algo.mis.reject_low",
    "algo.mis.reject_high",
)
def tis_bounds_are_ordered(config: RunConfig) -> list[Problem]:
    algo, mis = config.algo, config.algo.mis
    if not algo.use_tis or algo.custom_tis_function_path is not None:
        return []
    pairs = [("algo.tis_clip_low", algo.tis_clip_low, "algo.tis_clip", algo.tis_clip)]
    if algo.tis_type == TisType.mis:
        pairs = [("algo.mis.low", _or_inverse(mis.low, algo.tis_clip), "algo.tis_clip", algo.tis_clip)]
        if mis.reject_level is not None:
            name, high = "algo.mis.reject_high", mis.reject_high
            if high is None:
                name, high = "algo.tis_clip", algo.tis_clip
            pairs.append(("algo.mis.reject_low", _or_inverse(mis.reject_low, high), name, high))
    return [
        Problem(
            path=low_path, rule=f"be at most {high_path}={high:g}", value=f"{low:g}", fix="lower it, or raise the other"
        )
        for low_path, low, high_path, high in pairs
        if low > high
    ]


def _or_inverse(low: float | None, high: float) -> float:
    """What a lower bound that was left open comes to."""
    return 1 / high if low is None else low
