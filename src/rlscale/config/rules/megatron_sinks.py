"""Rules about models with attention sinks and biases of experts on Megatron-core."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.parallel import nearest_divisor
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def biases_of_experts_are_whole(config: RunConfig) -> list[Problem]:
    """Megatron-core 0.16 neither divides biases of experts nor has them in its legacy grouped GEMM."""
    family, megatron = architecture_field(config.model, "model_type"), config.megatron
    tensor, experts = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    # Megatron-core uses the tensor-parallel size where no expert size is set.
    within, fix = megatron.core_args.get("expert_tensor_parallel_size") or tensor, "set it to 1"
    if not uses_megatron(config) or not find_family(family).sinks:
        return []
    if tensor > 1 and experts == 1:
        fix += f", and megatron.expert_model_parallel_size to {tensor} or another size above 1"
    problems = []
    if within != 1:
        path = "megatron.expert_tensor_parallel_size"
        rule = f"be 1 with model.model_type={family}: Megatron-core 0.16 does not divide biases of experts"
        problems.append(Problem(path=path, rule=rule, value=show(within), fix=fix))
    if megatron.core_args.get("moe_use_legacy_grouped_gemm"):
        path = "megatron.moe_use_legacy_grouped_gemm"
        rule = f"be false with model.model_type={family}: this layer of Megatron-core 0.16 has no biases"
        problems.append(Problem(path=path, rule=rule, value="true", fix="remove it"))
    return problems


@rule
def context_ranks_divide_key_heads_with_sinks(config: RunConfig) -> list[Problem]:
    """Sinks need all keys of a sample on one rank: context-parallel ranks exchange tokens for heads."""
    family, heads = architecture_field(config.model, "model_type"), config.model.num_key_value_heads
    heads = architecture_field(config.model, "num_key_value_heads") if heads is None else heads
    tensor, context = config.megatron.tensor_model_parallel_size, config.megatron.context_parallel_size
    if not uses_megatron(config) or heads is None or context == 1 or not find_family(family).sinks:
        return []
    own = max(heads // tensor, 1)
    if own % context == 0:
        return []
    rule = f"divide the {own} key heads of a tensor-parallel rank with model.model_type={family}"
    fix = f"set it to {nearest_divisor(own, context)}"
    return [Problem(path="megatron.context_parallel_size", rule=rule, value=show(context), fix=fix)]
