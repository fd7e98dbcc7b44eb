"""Rules about models with layers of linear attention (gated delta nets)."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import read_hf_fields
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.groups.train import QkvFormat
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_engines, uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.parallel import nearest_divisor
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def linear_attention_fits_megatron(config: RunConfig) -> list[Problem]:
    """The state of a sample runs through all of its tokens, so that ranks cannot compute parts of it at once."""
    family, megatron = architecture_field(config.model, "model_type"), config.megatron
    if not uses_megatron(config) or not find_family(family).delta_net:
        return []
    wrong: list[tuple[str, str, object]] = []
    if megatron.context_parallel_size > 1:
        wrong.append(("megatron.context_parallel_size", "1", megatron.context_parallel_size))
    if megatron.core_args.get("fused_single_qkv_rope"):
        wrong.append(("megatron.fused_single_qkv_rope", "false", True))
    if config.train.lora.rank:
        wrong.append(("train.lora.rank", "0", config.train.lora.rank))
    if config.optim.name == OptimizerName.muon:
        wrong.append(("optim.name", "adam", config.optim.name))
    return [
        Problem(
            path=path,
            rule=f"be {needed} with train.backend=megatron and model.model_type={family} (not supported yet)",
            value=show(value),
            fix="remove it",
        )
        for path, needed, value in wrong
    ]


@rule
def ranks_divide_heads_of_linear_attention(config: RunConfig) -> list[Problem]:
    """Each key head of a gated delta net is on one tensor-parallel rank."""
    model, tensor = config.model, config.megatron.tensor_model_parallel_size
    if not uses_megatron(config) or model.build is not None:
        return []
    heads = read_hf_fields(model.hf_checkpoint).get("linear_key_heads")
    if heads is None or heads % tensor == 0:
        return []
    rule, fix = f"divide linear_num_key_heads={heads} of config.json", f"set it to {nearest_divisor(heads, tensor)}"
    return [Problem(path="megatron.tensor_model_parallel_size", rule=rule, value=show(tensor), fix=fix)]


@rule
def packed_samples_keep_their_own_state(config: RunConfig) -> list[Problem]:
    """Transformers passes the state of a gated delta net on from one packed sample to the next."""
    family, layout = architecture_field(config.model, "model_type"), config.train.qkv_format
    if uses_megatron(config) or not find_family(family).delta_net or layout == QkvFormat.bshd:
        return []
    rule = f"be bshd with train.backend=fsdp and model.model_type={family}"
    return [Problem(path="train.qkv_format", rule=rule, value=show(layout), fix="set it to bshd")]


@rule
def linear_attention_keeps_its_precision(config: RunConfig) -> list[Problem]:
    """Projections of gated delta nets have other names than the layers that are quantised."""
    family, precision = architecture_field(config.model, "model_type"), config.rollout.weight_precision
    if precision is None or not uses_engines(config) or not find_family(family).delta_net:
        return []
    rule = f"be null with model.model_type={family} (not supported yet: low precision of linear attention)"
    return [Problem(path="rollout.weight_precision", rule=rule, value=show(precision), fix="remove it")]
