"""Rules about batch sizes and prompts per rollout."""

from __future__ import annotations

import math

from rlscale.config.groups.data import prompt_paths
from rlscale.config.problems import show
from rlscale.config.rules.conditions import num_trainer_ranks, only_evaluates, ranks_per_model, samples_per_step
from rlscale.config.rules.parallel import divisors
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

MAX_TRAJECTORIES = 1_000_000  # of a rollout, the largest that `benchmarks/controller_scale.py` measures


@rule
def rollout_is_within_the_measured_size(config: RunConfig) -> list[Problem]:
    """The loop keeps every trajectory of a rollout in memory, which a mistyped number would fill."""
    names = ("rollout_batch_size", "n_samples_per_prompt")
    (other, least), (name, number) = sorted(
        ((each, getattr(config.batch, each)) for each in names), key=lambda pair: int(pair[1])
    )
    most = max(1, MAX_TRAJECTORIES // least)
    if number <= most:
        return []
    rule = f"be at most {most} with batch.{other}={least}, for {MAX_TRAJECTORIES:,} samples of a rollout"
    fix = f"set it to {most} or less; data.num_rollout is the number of rollouts"
    return [Problem(path=f"batch.{name}", rule=rule, value=show(number), fix=fix)]


@rule
def prompt_file_is_set(config: RunConfig) -> list[Problem]:
    if prompt_paths(config.data) or not config.data.rollout_global_dataset or only_evaluates(config):
        return []
    fix = "set it to a .jsonl or .parquet file, or choose data=arithmetic"
    return [Problem(path="data.prompt_data", rule="name a prompt file", value="null", fix=fix)]


@rule
def run_has_a_length(config: RunConfig) -> list[Problem]:
    if config.data.num_rollout is not None or config.data.num_epoch is not None:
        return []
    rule, fix = "be set with data.num_epoch=null", "set it, or data.num_epoch"
    return [Problem(path="data.num_rollout", rule=rule, value="null", fix=fix)]


@rule
def batch_sizes_are_consistent(config: RunConfig) -> list[Problem]:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""
    batch = config.batch
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    if samples > MAX_TRAJECTORIES:
        return []  # the rule above reports it
    product = f"rollout_batch_size * n_samples_per_prompt = {batch.rollout_batch_size} * {batch.n_samples_per_prompt}"
    for name in ("global_batch_size", "num_steps_per_rollout"):
        divisor = getattr(batch, name)
        if divisor is not None and samples % divisor:
            rule = f"divide {product} = {samples}"
            fix = _nearest_sizes(f"batch.{name}", divisor, samples, batch.n_samples_per_prompt)
            return [Problem(path=f"batch.{name}", rule=rule, value=show(divisor), fix=fix)]
    size, steps = batch.global_batch_size, batch.num_steps_per_rollout
    if size is None or steps is None or size * steps == samples:
        return []
    rule = f"be ({product}) / (num_steps_per_rollout = {steps}) = {samples // steps}"
    fix = (
        f"set batch.global_batch_size={samples // steps} or batch.num_steps_per_rollout={samples // size}, "
        "or remove one of them"
    )
    # A third way out, if the number of prompts divides the samples of all steps.
    if size * steps % batch.rollout_batch_size == 0:
        fix += f"; or set batch.n_samples_per_prompt={size * steps // batch.rollout_batch_size}"
    return [Problem(path="batch.global_batch_size", rule=rule, value=show(size), fix=fix)]


def _nearest_sizes(path: str, divisor: int, samples: int, group_size: int) -> str:
    """Suggests the divisors of `samples` next to `divisor`, and the numbers of prompts that `divisor` divides."""
    # The largest divisor below the value, and the smallest above it.
    known = divisors(samples)
    near = [number for number in known if number < divisor][-1:]
    near += [number for number in known if number > divisor][:1]
    # The smallest number of prompts whose samples are a multiple of the divisor; its multiples are too.
    step = divisor // math.gcd(divisor, group_size)
    # Round the number of prompts down to a multiple of the step.
    below = samples // group_size // step * step
    prompts = [number for number in (below, below + step) if number]
    sizes = " or ".join(show(number) for number in near)
    return f"nearest are {path}={sizes}, or batch.rollout_batch_size={' or '.join(show(number) for number in prompts)}"


@rule
def every_rank_has_a_sample(config: RunConfig) -> list[Problem]:
    cluster, shared, size = config.cluster, ranks_per_model(config), samples_per_step(config)
    ranks = num_trainer_ranks(config) // shared
    # More steps than samples leave none; another rule reports it.
    if size >= ranks or size == 0:
        return []
    product = f"cluster.actor_num_nodes={cluster.actor_num_nodes} * "
    product += f"cluster.actor_num_gpus_per_node={cluster.actor_num_gpus_per_node}"
    rule = f"be at least the number of trainer ranks, {product}"
    # Ranks that share a model process the same samples.
    if shared > 1:
        rule = f"be at least the number of data-parallel ranks, {product} / {shared}"
    fix = f"use fewer ranks (cluster.actor_num_gpus_per_node={max(size, 1) * shared}) or larger batches"
    return [Problem(path="batch.global_batch_size", rule=f"{rule} = {ranks}", value=show(size), fix=fix)]


@rule
def dynamic_batch_has_a_limit(config: RunConfig) -> list[Problem]:
    if not config.batch.use_dynamic_batch_size or config.batch.max_tokens_per_gpu is not None:
        return []
    rule, fix = "be set with batch.use_dynamic_batch_size", "set it, e.g. batch.max_tokens_per_gpu=8192"
    return [Problem(path="batch.max_tokens_per_gpu", rule=rule, value="null", fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("batch.micro_batch_size",),
        when=lambda config: config.batch.use_dynamic_batch_size,
        why="batch.use_dynamic_batch_size packs by tokens",
    ),
    IgnoredKey(
        names=("batch.max_tokens_per_gpu", "batch.log_probs_max_tokens_per_gpu"),
        when=lambda config: not config.batch.use_dynamic_batch_size,
        why="batch.use_dynamic_batch_size is false",
    ),
)
