"""Rules between keys, one small function each: RunConfig -> what is wrong with it.

Each rule names the keys it reads. When one of them was wrong in itself the rule is not asked: it could only report a
consequence. Bounds of a single key stand in its `Field`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlscale.config.rules.algo import (
    custom_loss_is_named,
    decoupled_loss_stands_alone,
    estimator_knows_the_kl_penalty,
    groups_can_be_centred,
    one_kl_penalty,
    one_reduction,
    overlong_buffer_fits,
    policy_loss_has_advantages,
    returns_are_whitened,
    supervised_training_has_labels,
    tis_bounds_are_ordered,
    tis_needs_trainer_logprobs,
)
from rlscale.config.rules.batch import (
    batch_identity,
    dynamic_batch_has_a_limit,
    every_rank_has_a_sample,
    prompts_are_given,
    run_has_a_length,
)
from rlscale.config.rules.data import epochs_need_the_dataset, first_rollout_is_in_the_run, prompts_have_a_source
from rlscale.config.rules.engines import interpreter_has_sglang
from rlscale.config.rules.model import heads_divide, lengths_fit, model_has_one_source, top_k_is_off_or_positive
from rlscale.config.rules.optim import one_warmup, schedule_is_ordered
from rlscale.config.rules.placement import (
    engines_divide_gpus,
    engines_have_gpus,
    shared_gpus_take_turns,
    trainer_fits_a_node,
    uses_router,
)
from rlscale.config.rules.rule import Rule, uses_decoupled_loss, uses_engines
from rlscale.config.rules.sampling import (
    evaluated_answers_can_be_long_enough,
    seeds_exclude_min_p,
    stop_strings_can_be_found,
)
from rlscale.config.rules.scoring import (
    dump_path_is_a_template,
    eval_file_is_right,
    eval_sets_are_pairs,
    evaluation_has_data,
    export_path_is_a_template,
    reward_has_labels,
    samples_are_scored,
    stop_reward_is_measured,
)
from rlscale.config.rules.weights import interval_keeps_the_bound, shared_memory_is_on_one_machine
from rlscale.config.run import RunConfig
from rlscale.errors import Problem

__all__ = ["RULES", "Rule", "check_rules", "uses_decoupled_loss", "uses_engines", "uses_router"]

RULES: tuple[Rule, ...] = (
    model_has_one_source,
    heads_divide,
    lengths_fit,
    top_k_is_off_or_positive,
    stop_strings_can_be_found,
    seeds_exclude_min_p,
    evaluated_answers_can_be_long_enough,
    prompts_are_given,
    prompts_have_a_source,
    run_has_a_length,
    epochs_need_the_dataset,
    first_rollout_is_in_the_run,
    batch_identity,
    every_rank_has_a_sample,
    dynamic_batch_has_a_limit,
    groups_can_be_centred,
    estimator_knows_the_kl_penalty,
    one_kl_penalty,
    returns_are_whitened,
    custom_loss_is_named,
    policy_loss_has_advantages,
    one_reduction,
    overlong_buffer_fits,
    supervised_training_has_labels,
    tis_needs_trainer_logprobs,
    tis_bounds_are_ordered,
    decoupled_loss_stands_alone,
    one_warmup,
    schedule_is_ordered,
    interval_keeps_the_bound,
    shared_memory_is_on_one_machine,
    trainer_fits_a_node,
    engines_have_gpus,
    engines_divide_gpus,
    interpreter_has_sglang,
    shared_gpus_take_turns,
    samples_are_scored,
    reward_has_labels,
    evaluation_has_data,
    eval_sets_are_pairs,
    eval_file_is_right,
    stop_reward_is_measured,
    export_path_is_a_template,
    dump_path_is_a_template,
)


def check_rules(config: RunConfig, *, broken: Iterable[str] = ()) -> list[Problem]:
    """Problems of all rules that read no broken key or group (an empty string stands for all of them)."""
    unreliable = tuple(broken)

    def reliable(key: str) -> bool:
        return not any(not name or key == name or key.startswith(f"{name}.") for name in unreliable)

    sound = [each for each in RULES if all(reliable(key) for key in each.reads)]
    return [problem for each in sound for problem in each(config)]
