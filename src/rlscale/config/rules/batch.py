"""Rules about prompts, batch sizes and the length of the run."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.rules.rule import PARALLEL, num_trainer_ranks, ranks_per_model, rule, samples_per_step
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("data.prompt_data", "data.rollout_global_dataset")
def prompts_are_given(config: RunConfig) -> list[Problem]:
    if config.data.prompt_data is not None or not config.data.rollout_global_dataset:
        return []
    fix = "set it to a .jsonl file, or choose data=arithmetic"
    return [Problem(path="data.prompt_data", rule="name a prompt file", value="null", fix=fix)]


@rule("data.num_rollout", "data.num_epoch")
def run_has_a_length(config: RunConfig) -> list[Problem]:
    if config.data.num_rollout is not None or config.data.num_epoch is not None:
        return []
    return [Problem(path="data.num_rollout", rule="be set", value="null", fix="set it, or data.num_epoch")]


@rule(
    "batch.rollout_batch_size",
    "batch.n_samples_per_prompt",
    "batch.global_batch_size",
    "batch.num_steps_per_rollout",
)
def batch_identity(config: RunConfig) -> list[Problem]:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""
    batch = config.batch
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    product = f"rollout_batch_size * n_samples_per_prompt = {batch.rollout_batch_size} * {batch.n_samples_per_prompt}"
    for name in ("global_batch_size", "num_steps_per_rollout"):
        divisor = getattr(batch, name)
        if divisor is not None and samples % divisor:
            rule = f"divide {product} = {samples}"
            fix = _batch_fix(f"batch.{name}", divisor, samples, batch.n_samples_per_prompt)
            return [Problem(path=f"batch.{name}", rule=rule, value=show(divisor), fix=fix)]
    size, steps = batch.global_batch_size, batch.num_steps_per_rollout
    if size is None or steps is None or size * steps == samples:
        return []
    rule = f"be ({product}) / (num_steps_per_rollout = {steps}) = {samples // steps}"
    fix = (
        f"set batch.global_batch_size={samples // steps} or batch.num_steps_per_rollout={samples // size}, "
        "or leave one of them out"
    )
    if size * steps % batch.rollout_batch_size == 0:
        fix += f"; or batch.n_samples_per_prompt={size * steps // batch.rollout_batch_size}"
    return [Problem(path="batch.global_batch_size", rule=rule, value=show(size), fix=fix)]


def _batch_fix(path: str, divisor: int, samples: int, group_size: int) -> str:
    """The nearest divisors below and above, and the nearest numbers of prompts that `divisor` fits."""
    divisors = [number for number in range(1, samples + 1) if samples % number == 0]
    near = [max(number for number in divisors if number < divisor)]
    near += [number for number in divisors if number > divisor][:1]
    prompts: list[int] = []
    step = next(number for number in range(1, divisor + 1) if number * group_size % divisor == 0)
    below = samples // group_size // step * step
    prompts = [number for number in (below, below + step) if number]
    sizes = " or ".join(show(number) for number in near)
    return f"nearest are {path}={sizes}, or batch.rollout_batch_size={' or '.join(show(number) for number in prompts)}"


@rule(
    "batch.rollout_batch_size",
    "batch.n_samples_per_prompt",
    "batch.global_batch_size",
    "batch.num_steps_per_rollout",
    *PARALLEL,
)
def every_rank_has_a_sample(config: RunConfig) -> list[Problem]:
    cluster, each, size = config.cluster, ranks_per_model(config), samples_per_step(config)
    ranks = num_trainer_ranks(config) // each
    if size >= ranks:
        return []
    product = f"cluster.actor_num_nodes={cluster.actor_num_nodes} * "
    product += f"cluster.actor_num_gpus_per_node={cluster.actor_num_gpus_per_node}"
    rule = f"be at least the number of trainer ranks, {product}"
    if each > 1:
        rule = f"be at least the number of data-parallel ranks, {product} / {each}"
    fix = f"use fewer ranks (cluster.actor_num_gpus_per_node={max(size, 1) * each}) or larger batches"
    return [Problem(path="batch.global_batch_size", rule=f"{rule} = {ranks}", value=show(size), fix=fix)]


@rule("batch.use_dynamic_batch_size", "batch.max_tokens_per_gpu")
def dynamic_batch_has_a_limit(config: RunConfig) -> list[Problem]:
    if not config.batch.use_dynamic_batch_size or config.batch.max_tokens_per_gpu is not None:
        return []
    fix = "set it, e.g. batch.max_tokens_per_gpu=8192"
    rule = "be set with batch.use_dynamic_batch_size"
    return [Problem(path="batch.max_tokens_per_gpu", rule=rule, value="null", fix=fix)]
