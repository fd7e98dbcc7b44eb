"""Layer specifications: Transformer Engine's layers where it and CUDA are available, else torch layers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from rlscale.architectures.family import Family
from rlscale.training.megatron.model.attention import TorchAttention
from rlscale.training.megatron.model.gated_delta_net import GatedAttention, GatedDeltaNet, HeadNorm
from rlscale.training.megatron.model.layers import (
    ExpertRowParallelLinear,
    NormColumnParallelLinear,
    RmsNorm,
    with_post_norm,
)
from rlscale.training.megatron.model.mla import LatentAttention, ReplicatedLinear
from rlscale.training.megatron.model.mtp import make_mtp_spec
from rlscale.training.megatron.model.sink_attention import SinkAttention
from rlscale.training.megatron.model.transformer_config import has_linear_attention
from rlscale.training.megatron.model.vision import DeepstackLayer
from rlscale.training.megatron.model.wide_norm import WideNormAttention


class TorchSpecProvider(LocalSpecProvider):  # type: ignore[misc]  # Megatron-core has no types
    """The layers of this package, in every place where Transformer Engine has its own."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def linear(self) -> type:
        return ReplicatedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RmsNorm

    def core_attention(self) -> type:
        return TorchAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowParallelLinear)


def block_spec(config: TransformerConfig, *, family: Family, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk and its final norm.

    Args:
        config: of the whole model.
        family: of the model.
        vp_stage: index of the chunk on this rank, with an interleaved pipeline; None without one.
    """
    provider = spec_provider()
    # Indexed by the layer in the whole model; this chunk has `number` layers from `first`.
    kinds = [(each, has_linear_attention(config, i)) for i, each in enumerate(_has_experts(config))]
    specs = {
        kind: _layer_spec(config, provider, has_experts=kind[0], is_linear=kind[1], family=family)
        for kind in set(kinds)
    }
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    number = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [specs[kind] for kind in kinds[first : first + number]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True))


def mtp_spec(
    config: TransformerConfig, *, family: Family, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers for multi-token prediction of one pipeline chunk; None except on the last one. Arguments as above."""
    number = get_mtp_num_layers_to_build(config, vp_stage=vp_stage)
    if not number:
        return None
    provider = spec_provider()
    # Each contains a decoder layer of the kind of the last one.
    layer = _layer_spec(config, provider, has_experts=_has_experts(config)[-1], family=family)
    return make_mtp_spec(layer, provider=provider, number=number)


def _has_experts(config: TransformerConfig) -> list[bool]:
    """Whether each layer of the whole model has experts."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None or isinstance(frequency, int):
        return [config.num_moe_experts is not None] * config.num_layers
    return [bool(each) for each in frequency]


def spec_provider() -> Any:
    """Provider of Transformer Engine's layers where it and CUDA are available, else of this package's."""
    # Megatron-core itself replaces a missing Transformer Engine by a mock, of which no layer can be made.
    if torch.cuda.is_available() and find_spec("transformer_engine") is not None:
        # Imported here: these modules use names that only Transformer Engine defines.
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        if HAVE_TE:
            return TESpecProvider()
    return TorchSpecProvider()


def _layer_spec(
    config: TransformerConfig, provider: Any, *, has_experts: bool, family: Family, is_linear: bool = False
) -> ModuleSpec:
    norm, row = provider.layer_norm(rms_norm=True), provider.row_parallel_linear()
    if family.post_norms:
        row = with_post_norm(row, norm)
    if has_experts:
        mlp = get_moe_module_spec_for_backend(
            backend=provider, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    else:
        first = provider.column_parallel_layer_norm_linear()
        mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=first, linear_fc2=row))
    is_latent = config.multi_latent_attention
    if is_latent:
        attention = _latent_attention_spec(provider)
    elif is_linear:
        attention = _linear_attention_spec(provider)
    else:
        attention = _attention_spec(config, provider, row=row, family=family)
    return ModuleSpec(
        module=TransformerLayer if family.vision is None else DeepstackLayer,
        submodules=TransformerLayerSubmodules(
            # Other layers have the norm inside their first projection.
            input_layernorm=norm if is_latent else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if has_experts else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(config: TransformerConfig, provider: Any, *, row: type, family: Family) -> ModuleSpec:
    norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_layer_norm_linear(),
        core_attention=SinkAttention if family.sinks else provider.core_attention(),
        linear_proj=row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    kind = WideNormAttention if family.wide_qk_norm else GatedAttention if family.delta_net else SelfAttention
    return ModuleSpec(module=kind, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _linear_attention_spec(provider: Any) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(
        in_proj=provider.column_parallel_layer_norm_linear(),
        out_norm=HeadNorm,
        out_proj=provider.row_parallel_linear(),
    )
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules)


def _latent_attention_spec(provider: Any) -> ModuleSpec:
    """Latent attention whose up-projections include the norms of the latents."""
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=provider.column_parallel_linear(),
        linear_q_down_proj=provider.linear(),
        linear_q_up_proj=provider.column_parallel_layer_norm_linear(),
        linear_kv_down_proj=provider.linear(),
        linear_kv_up_proj=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return ModuleSpec(module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
