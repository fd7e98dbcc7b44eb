"""Rules about models with attention sinks and biases of experts on Megatron-core."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_FSDP = "remove it, or choose train=fsdp"


@rule
def models_with_sinks_fit_megatron(config: RunConfig) -> list[Problem]:
    """Sinks need all keys of a sample on one rank. Megatron-core 0.16 does not divide experts with biases."""
    family, megatron = architecture_field(config.model, "model_type"), config.megatron
    tensor, experts = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    # Megatron-core uses the tensor-parallel size where no expert size is set.
    within, fix = megatron.core_args.get("expert_tensor_parallel_size") or tensor, "set it to 1"
    if tensor > 1 and experts == 1:
        fix += f", and megatron.expert_model_parallel_size to {tensor} or another size above 1"
    is_legacy = bool(megatron.core_args.get("moe_use_legacy_grouped_gemm"))
    found: tuple[tuple[str, object, object, str], ...] = (
        ("megatron.context_parallel_size", 1, megatron.context_parallel_size, _FSDP),
        ("megatron.expert_tensor_parallel_size", 1, within, fix),
        ("megatron.moe_use_legacy_grouped_gemm", False, is_legacy, "remove it"),
        ("train.lora.rank", 0, config.train.lora.rank or 0, _FSDP),
        ("optim.name", OptimizerName.adam, config.optim.name, _FSDP),
    )
    if not uses_megatron(config) or family is None or not find_family(family).sinks:
        return []
    rule = f"with train.backend=megatron and model.model_type={family} (not supported yet)"
    return [
        Problem(path=path, rule=f"be {show(needed)} {rule}", value=show(value), fix=fix)
        for path, needed, value, fix in found
        if value != needed
    ]
