"""Megatron-core's TransformerConfig for a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu as core_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import hf_fields
from rlscale.architectures.megatron_fields import check_architecture, has_latent_attention, transformer_fields
from rlscale.architectures.tower_shape import TowerShape
from rlscale.architectures.vision import VisionLayout
from rlscale.config import MegatronConfig, ModelConfig
from rlscale.config.rules.model import megatron_keys
from rlscale.errors import ConfigError
from rlscale.models.transformers_aliases import register_aliases
from rlscale.training.megatron.model.field_values import field_values
from rlscale.training.megatron.model.mla import latent_sizes
from rlscale.training.megatron.model.rotary import yarn_fields

DEFAULTS: Mapping[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",  # the only one that supports micro-batches of different lengths
    # Losses and biases that balance experts are for pre-training.
    "moe_router_load_balancing_type": "none",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Defaults of rlscale for fields that `megatron` leaves unset."""

BIAS_DEFAULTS: Mapping[str, Any] = {
    # As in transformers and the engines.
    "moe_router_dtype": "fp32",
    # An update would change the policy outside of its loss, between a sample's generation and its training.
    "moe_router_bias_update_rate": 0.0,
}
"""The same for models that choose experts with a bias on the scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronArchitecture:
    """The view of an architecture that Megatron-core builds a model from."""

    architecture: Architecture
    family: str  # its table of weight names applies, e.g. `qwen3`
    hf_config: PreTrainedConfig  # of the decoder
    vision_config: PreTrainedConfig | None  # of the vision tower; None: text only
    transformer: TransformerConfig
    padded_vocab_size: int  # rows of the embedding over all tensor-parallel ranks

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.architecture.vocab_size

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.architecture.tied

    def untied(self) -> MegatronArchitecture:
        """The same architecture with an embedding that is not the output layer."""
        return replace(self, architecture=replace(self.architecture, tied=False))


def has_linear_attention(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer, counted over the whole model, has linear attention."""
    return config.linear_attention_freq is not None and bool(config.linear_attention_freq[layer])


def load_architecture(
    path: str, *, model: ModelConfig, megatron: MegatronConfig, dtype: torch.dtype
) -> MegatronArchitecture:
    """The architecture of a Hugging Face folder or hub id for Megatron-core.

    Args:
        path: folder or hub id; its `config.json` decides.
        model: keys that must agree with it, and the padding of the vocabulary.
        megatron: parallel sizes and further fields of Megatron-core.
        dtype: of parameters and activations.

    Raises:
        ConfigError: with every key that contradicts `config.json`, and every feature that Megatron-core does not have.
    """
    register_aliases()
    config = AutoConfig.from_pretrained(path)
    config_json = config.to_dict()
    problems = check_architecture(config_json, megatron_keys(model, megatron))
    if problems:
        raise ConfigError(problems)
    core = _transformer_fields(config_json, megatron=megatron, dtype=dtype)
    if find_family(config_json["model_type"]).sigmoid_experts:
        core = {**BIAS_DEFAULTS, **core}
    text = config.get_text_config()
    architecture, num_parts = Architecture.from_config_json(config_json), megatron.tensor_model_parallel_size
    has_images = find_family(config_json["model_type"]).vision is not None
    if has_images:
        core["mrope_section"] = list(VisionLayout.from_config_json(config_json).rotary_sections)
        tower = TowerShape.from_config(config.model_type, config_json["vision_config"])
        architecture = replace(architecture, tower=tower)
    if has_latent_attention(config_json):
        sizes = latent_sizes(hf_fields(config_json), text)
        transformer = MLATransformerConfig(**{**core, **sizes})
    else:
        if find_family(config_json["model_type"]).delta_net:
            # Megatron-core asserts it, as its own layer has no context parallelism; ours exchanges heads.
            core["context_parallel_size"] = 1
        transformer = TransformerConfig(**core)
        transformer.context_parallel_size = megatron.context_parallel_size
        for name, value in yarn_fields(text).items():
            setattr(transformer, name, value)  # not dataclass fields, but attention reads them
    return MegatronArchitecture(
        architecture=architecture,
        family=model.name or config.model_type,
        hf_config=text,
        vision_config=config.vision_config if has_images else None,
        transformer=transformer,
        # Rounded up to a multiple of the ranks.
        padded_vocab_size=model.padded_vocab_size or -(-architecture.vocab_size // num_parts) * num_parts,
    )


def _transformer_fields(
    config_json: Mapping[str, Any], *, megatron: MegatronConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Fields of a TransformerConfig. Later entries win: defaults, the model, parallel sizes, `megatron.core_args`."""
    found = {
        **DEFAULTS,
        **_layer_fields(hf_fields(config_json)),
        **transformer_fields(config_json),
        # Every weight is loaded, so memory stays uninitialised.
        "init_method": _no_init,
        "output_layer_init_method": _no_init,
        "embedding_init_method": _no_init,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "variable_seq_lengths": megatron.variable_seq_lengths,
        "recompute_granularity": megatron.recompute_granularity and str(megatron.recompute_granularity),
    }
    if megatron.core_args.get("virtual_pipeline_model_parallel_size"):
        # Batched P2P would put both directions between two stages into one batch, and the messages would be mixed up.
        found |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if find_family(config_json["model_type"]).sinks:
        # Megatron-core fuses only its own function, which is compiled at its first call.
        found["activation_func"] = core_gelu if megatron.core_args.get("bias_activation_fusion") else quick_gelu
    found |= field_values(MLATransformerConfig, megatron.core_args)
    coefficient, kind = found.get("moe_aux_loss_coeff"), "moe_router_load_balancing_type"
    if coefficient and not isinstance(coefficient, list) and kind not in megatron.core_args:
        found[kind] = "aux_loss"  # Megatron-core's default
    if not found.get("mtp_num_layers"):
        found.pop("mtp_num_layers", None)  # Megatron-core would build a block of 0 layers
    if found.get("mtp_loss_scaling_factor") is None:
        found.pop("mtp_loss_scaling_factor", None)
    if found["recompute_granularity"] != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            found.pop(name)
    return found


def _layer_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the layers, from architecture fields."""
    heads = int(given["num_attention_heads"])
    found = {
        "num_layers": given["num_layers"],
        "hidden_size": given["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": given.get("num_key_value_heads", heads),
        "kv_channels": given.get("head_dim") or given["hidden_size"] // heads,
        "ffn_hidden_size": given.get("intermediate_size", given["hidden_size"]),
        "activation_func": F.silu,
    }
    if given.get("num_experts"):
        found |= {
            "num_moe_experts": given["num_experts"],
            "moe_router_topk": given["num_experts_per_tok"],
            "moe_ffn_hidden_size": given["moe_intermediate_size"],
        }
    return found


def quick_gelu(gate: Tensor) -> Tensor:
    """The gate of an expert of gpt-oss: x sigmoid(1.702 x)."""
    return gate * torch.sigmoid(1.702 * gate)


def _no_init(weight: Tensor) -> Tensor:
    return weight
