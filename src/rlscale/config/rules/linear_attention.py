"""Rules about models with layers of linear attention (gated delta nets)."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import read_hf_fields
from rlscale.config.groups.train import QkvFormat
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.parallel import nearest_divisor
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def gated_attention_is_not_fused(config: RunConfig) -> list[Problem]:
    """Megatron-core 0.16 fuses the projections of attention with rotary positions only without output gates."""
    family = architecture_field(config.model, "model_type")
    is_fused = config.megatron.core_args.get("fused_single_qkv_rope")
    if not uses_megatron(config) or not is_fused or not find_family(family).delta_net:
        return []
    rule = f"be false with model.model_type={family}: this kernel of Megatron-core 0.16 has no output gates"
    return [Problem(path="megatron.fused_single_qkv_rope", rule=rule, value="true", fix="remove it")]


@rule
def ranks_divide_heads_of_linear_attention(config: RunConfig) -> list[Problem]:
    """Each key head of a gated delta net is on one tensor-parallel rank, and context-parallel ranks exchange them.

    The state of a sample runs through all of its tokens, so a rank needs all of them.
    """
    model, megatron = config.model, config.megatron
    tensor, context = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    if not uses_megatron(config) or model.build is not None:
        return []
    heads = read_hf_fields(model.hf_checkpoint).get("linear_key_heads")
    if heads is None or heads % (tensor * context) == 0:
        return []
    if heads % tensor:
        rule, fix = f"divide linear_num_key_heads={heads} of config.json", f"set it to {nearest_divisor(heads, tensor)}"
        return [Problem(path="megatron.tensor_model_parallel_size", rule=rule, value=show(tensor), fix=fix)]
    own = heads // tensor
    rule = f"divide the {own} key heads of a tensor-parallel rank, of linear_num_key_heads={heads} of config.json"
    fix = f"set it to {nearest_divisor(own, context)}"
    return [Problem(path="megatron.context_parallel_size", rule=rule, value=show(context), fix=fix)]


@rule
def packed_samples_keep_their_own_state(config: RunConfig) -> list[Problem]:
    """Transformers passes the state of a gated delta net on from one packed sample to the next."""
    family, layout = architecture_field(config.model, "model_type"), config.train.qkv_format
    if uses_megatron(config) or not find_family(family).delta_net or layout == QkvFormat.bshd:
        return []
    rule = f"be bshd with train.backend=fsdp and model.model_type={family}"
    return [Problem(path="train.qkv_format", rule=rule, value=show(layout), fix="set it to bshd")]
