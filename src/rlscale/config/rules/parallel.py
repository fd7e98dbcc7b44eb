"""Rules about parallel sizes: data, tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

import math
from operator import attrgetter

from rlscale.config.groups.fsdp import AttnImplementation
from rlscale.config.groups.train import QkvFormat, TrainBackendName
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    num_trainer_ranks,
    ranks_per_model,
    samples_per_step,
    uses_megatron,
)
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of Megatron-core that allow stages with different numbers of layers."""


@rule
def parallel_sizes_divide_trainer_ranks(config: RunConfig) -> list[Problem]:
    """The ranks that share one copy of the model divide the ranks of the trainer."""
    ranks, shared = num_trainer_ranks(config), ranks_per_model(config)
    if ranks % shared == 0:
        return []
    cluster = config.cluster
    trainer = f"the trainer's {cluster.actor_num_nodes} * {cluster.actor_num_gpus_per_node} = {ranks} ranks"
    if config.train.backend == TrainBackendName.fsdp:
        path, fix = "fsdp.context_parallel_size", f"set it to {nearest_divisor(ranks, shared)}"
        return [Problem(path=path, rule=f"divide {trainer}", value=show(shared), fix=fix)]
    megatron = config.megatron
    sizes = {
        "tensor": megatron.tensor_model_parallel_size,
        "pipeline": megatron.pipeline_model_parallel_size,
        "context": megatron.context_parallel_size,
    }
    product = " * ".join(f"{name} {size}" for name, size in sizes.items())
    # The message names a key whose size is above 1: sorting puts sizes of 1 last.
    first, *others = sorted(sizes, key=lambda name: sizes[name] == 1)
    rule = f"divide {trainer}, together with {others[0]} and {others[1]}"
    fix = f"lower one of the three, or use a multiple of {shared} GPUs"
    path = f"megatron.{first}_parallel_size" if first == "context" else f"megatron.{first}_model_parallel_size"
    return [Problem(path=path, rule=rule, value=f"{product} = {shared}", fix=fix)]


@rule
def context_parallel_excludes_eager_attention(config: RunConfig) -> list[Problem]:
    """Context parallelism uses an attention of rlscale on every device."""
    fsdp = config.fsdp
    is_off = config.train.backend != TrainBackendName.fsdp or fsdp.context_parallel_size == 1
    if is_off or fsdp.attn_implementation != AttnImplementation.eager:
        return []
    rule, fix = f"not be eager with fsdp.context_parallel_size={fsdp.context_parallel_size}", "remove it"
    return [Problem(path="fsdp.attn_implementation", rule=rule, value="eager", fix=fix)]


@rule
def batch_divides_among_ranks(config: RunConfig) -> list[Problem]:
    """Every data-parallel rank gets the same number of samples of a step."""
    ranks, shared, size = num_trainer_ranks(config), ranks_per_model(config), samples_per_step(config)
    # Other rules report the first two cases.
    if ranks % shared or size < ranks // shared or size % (ranks // shared) == 0:
        return []
    parts = ranks // shared
    cluster = config.cluster
    product = f"cluster.actor_num_nodes={cluster.actor_num_nodes} * "
    product += f"cluster.actor_num_gpus_per_node={cluster.actor_num_gpus_per_node}"
    product += f" / {shared} ranks per model = {parts}" if shared > 1 else f" = {parts}"
    fix = f"{_fitting_sizes(config, parts)}, or use {nearest_divisor(size, parts)} data-parallel ranks"
    rule = f"be a multiple of the number of data-parallel ranks, {product}"
    return [Problem(path="batch.global_batch_size", rule=rule, value=show(size), fix=fix)]


def _fitting_sizes(config: RunConfig, parts: int) -> str:
    """Sizes of an optimiser step that a number of ranks divides and that divide the samples of a rollout."""
    batch, size = config.batch, samples_per_step(config)
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    fitting = [number for number in divisors(samples) if number % parts == 0]
    near = [number for number in fitting if number < size][-1:] + [number for number in fitting if number > size][:1]
    if near:
        return f"set {' or '.join(f'batch.global_batch_size={number}' for number in near)}"
    # The prompts of as many steps, of which every rank gets the same number of samples.
    steps = max(1, samples // size)
    unit = parts * steps // math.gcd(parts * steps, batch.n_samples_per_prompt)
    prompts = batch.rollout_batch_size // unit * unit or unit
    size = prompts * batch.n_samples_per_prompt // steps
    return f"set batch.rollout_batch_size={prompts} and batch.global_batch_size={size}"


@rule
def micro_batch_size_divides_samples_per_rank(config: RunConfig) -> list[Problem]:
    """Megatron-core runs micro-batches of one size, the same number on every rank."""
    batch = config.batch
    ranks, shared, size = num_trainer_ranks(config), ranks_per_model(config), samples_per_step(config)
    # A wrong parallel size is reported by another rule; avoid a division by 0.
    parts = max(ranks // shared, 1)
    is_free = not uses_megatron(config) or batch.use_dynamic_batch_size
    if is_free or size % parts or (size // parts) % batch.micro_batch_size == 0:
        return []
    share = size // parts
    rule, fix = (
        f"divide the {share} samples per rank and step",
        f"set it to {nearest_divisor(share, batch.micro_batch_size)}",
    )
    return [Problem(path="batch.micro_batch_size", rule=rule, value=show(batch.micro_batch_size), fix=fix)]


@rule
def tensor_parallel_divides_heads(config: RunConfig) -> list[Problem]:
    if not uses_megatron(config):
        return []
    path, size = "megatron.tensor_model_parallel_size", config.megatron.tensor_model_parallel_size
    return check_head_division(config, path, size)


@rule
def pipeline_parallel_divides_layers(config: RunConfig) -> list[Problem]:
    size, layers = config.megatron.pipeline_model_parallel_size, config.model.num_layers
    uneven = any(config.megatron.core_args.get(name) for name in UNEVEN_STAGES)
    if not uses_megatron(config) or layers is None or uneven or layers % size == 0:
        return []
    rule = f"divide model.num_layers={layers}"
    fix = f"set it to {nearest_divisor(layers, size)}, or set megatron.{UNEVEN_STAGES[1]}=<number> for an uneven stage"
    return [Problem(path="megatron.pipeline_model_parallel_size", rule=rule, value=show(size), fix=fix)]


@rule
def expert_parallel_divides_experts_and_ranks(config: RunConfig) -> list[Problem]:
    """Each rank of an expert-parallel group, within one pipeline stage, has the same number of experts."""
    megatron, model = config.megatron, config.model
    size, given = megatron.expert_model_parallel_size, megatron.core_args.get("expert_tensor_parallel_size")
    if not uses_megatron(config) or (size == 1 and not given):
        return []
    path, experts = "megatron.expert_model_parallel_size", model.num_experts
    if size > 1 and experts is None and model.num_layers is not None:
        return [Problem(path=path, rule="be 1 for a model without experts", value=show(size), fix="remove it")]
    stage, odd = divmod(num_trainer_ranks(config), megatron.pipeline_model_parallel_size)
    # Megatron-core shards each expert over the tensor-parallel ranks where no other size is set.
    within = int(given or megatron.tensor_model_parallel_size)
    if given and not odd and stage % within:
        rule, fix = f"divide the {stage} ranks of a pipeline stage", f"set it to {nearest_divisor(stage, within)}"
        return [Problem(path="megatron.expert_tensor_parallel_size", rule=rule, value=show(within), fix=fix)]
    # Of a stage that other sizes do not divide, another rule reports the problem.
    groups = 0 if odd or stage % within else stage // within
    fix = f"set it to {nearest_divisor(math.gcd(groups, experts or 0) or 1, size)}"
    problems = []
    if experts is not None and experts % size:
        rule = f"divide model.num_experts={experts}"
        problems.append(Problem(path=path, rule=rule, value=show(size), fix=fix))
    if groups and groups % size:
        rule = f"divide the {stage} ranks of a pipeline stage"
        rule += f", times megatron.expert_tensor_parallel_size={within}" if within > 1 else ""
        fix += ", or set megatron.expert_tensor_parallel_size=1" if within > 1 and stage % size == 0 else ""
        problems.append(Problem(path=path, rule=rule, value=show(size), fix=fix))
    return problems


@rule
def padded_layout_has_fixed_micro_batches(config: RunConfig) -> list[Problem]:
    """Padded micro-batches have a fixed number of samples, each in a separate row on one rank."""
    if config.train.qkv_format != QkvFormat.bshd:
        return []
    problems = []
    if config.batch.use_dynamic_batch_size:
        rule, fix = "be false with train.qkv_format=bshd", "use train.qkv_format=thd to pack by tokens, or remove it"
        problems.append(Problem(path="batch.use_dynamic_batch_size", rule=rule, value="true", fix=fix))
    # Both options need packed sequences.
    packs = {"train.true_on_policy_mode": config.train.true_on_policy_mode}
    if config.train.backend == TrainBackendName.fsdp:
        packs["fsdp.context_parallel_size"] = config.fsdp.context_parallel_size > 1
    for path in (path for path, is_on in packs.items() if is_on):
        rule = f"be thd with {path}={show(attrgetter(path)(config))}"
        problems.append(Problem(path="train.qkv_format", rule=rule, value="bshd", fix="remove it"))
    return problems


def check_head_division(config: RunConfig, path: str, size: int, *, units: int = 1) -> list[Problem]:
    """Checks that the ranks divide the query heads, and divide the key/value heads or are a multiple of them.

    Args:
        path: the key whose value is `units` times the number of ranks.
    """
    heads, kv_heads = config.model.num_attention_heads, config.model.num_key_value_heads
    divides_heads = heads is None or heads % size == 0
    # With more ranks than key/value heads, several ranks hold a copy of each head.
    if divides_heads and (kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0):
        return []
    if divides_heads:
        rule = f"divide model.num_key_value_heads={kv_heads}, or be a multiple of it"
        times = f"a divisor or a multiple of model.num_key_value_heads={kv_heads}"
    else:
        rule, times = (f"{word} model.num_attention_heads={heads}" for word in ("divide", "a divisor of"))
    rule = rule if units == 1 else f"be {units} times {times}"
    allowed = [
        n
        for n in divisors(heads or kv_heads or 1)
        if (heads or n) % n == 0 and (kv_heads is None or kv_heads % n == 0 or n % kv_heads == 0)
    ]
    nearest = min(allowed, key=lambda n: (abs(n - size), n))
    return [Problem(path=path, rule=rule, value=show(size * units), fix=f"set it to {nearest * units}")]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the smaller of two."""
    return min(divisors(number), key=lambda d: (abs(d - wanted), d))


def divisors(number: int) -> list[int]:
    """The divisors of a number in ascending order; of a number above 10^12 only those below 10^6 and their partners.

    A number that was typed wrong can be any, and an error must not take minutes.
    """
    small = [d for d in range(1, min(math.isqrt(number), 1_000_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
