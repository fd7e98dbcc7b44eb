"""Rules about estimator, loss and corrections."""

from __future__ import annotations

from rlscale.config.algo import LossType
from rlscale.config.problems import show
from rlscale.config.rules.rule import rule
from rlscale.config.run import RunConfig
from rlscale.errors import Problem


@rule("algo.loss_type", "algo.advantage_estimator", "algo.rewards_normalization", "batch.n_samples_per_prompt")
def groups_can_be_centred(config: RunConfig) -> list[Problem]:
    """All estimators built so far centre rewards on their group; in a group of one every advantage is 0."""
    algo = config.algo
    if algo.loss_type == LossType.sft_loss or not algo.rewards_normalization or config.batch.n_samples_per_prompt > 1:
        return []
    rule = f"be at least 2 with algo.advantage_estimator={algo.advantage_estimator}"
    fix = "every advantage would be 0; set e.g. batch.n_samples_per_prompt=8, or algo.rewards_normalization=false"
    return [Problem(path="batch.n_samples_per_prompt", rule=rule, value="1", fix=fix)]


@rule("algo.loss_type", "batch.n_samples_per_prompt", "data.label_key")
def supervised_training_has_labels(config: RunConfig) -> list[Problem]:
    if config.algo.loss_type != LossType.sft_loss:
        return []
    problems = []
    number = config.batch.n_samples_per_prompt
    if number != 1:
        fix = "a prompt has one label; set batch.n_samples_per_prompt=1"
        rule = "be 1 with algo.loss_type=sft_loss"
        problems.append(Problem(path="batch.n_samples_per_prompt", rule=rule, value=show(number), fix=fix))
    if config.data.label_key is None:
        fix = "set it to the field that holds the answer"
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


@rule("algo.use_tis", "algo.tis_clip", "algo.tis_clip_low")
def tis_bounds_are_ordered(config: RunConfig) -> list[Problem]:
    algo = config.algo
    if not algo.use_tis or algo.tis_clip_low <= algo.tis_clip:
        return []
    rule = f"be at most algo.tis_clip={algo.tis_clip:g}"
    return [Problem(path="algo.tis_clip_low", rule=rule, value=show(algo.tis_clip_low))]
