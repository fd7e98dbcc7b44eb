"""Which layers are quantised, how large they are, and how a `config.json` declares them."""

import re

import pytest
import torch

from rlscale.architectures.family import load_families, names_with
from rlscale.architectures.low_precision import PRECISIONS, is_quantized, quantization_config, quantized_bytes
from rlscale.config import WeightPrecision
from rlscale.models.quantized_weights import QuantizedWeight, encode_weight

QUANTIZED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.11.mlp.down_proj.weight",
    "model.layers.3.mlp.experts.7.gate_proj.weight",
    "model.layers.3.mlp.shared_experts.up_proj.weight",
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
    "model.language_model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.linear_attn.in_proj_qkvz.weight",
    "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
    "model.language_model.layers.0.linear_attn.in_proj_z.weight",
    "model.layers.0.linear_attn.out_proj.weight",
    "model.layers.0.mlp.shared_expert.down_proj.weight",
    "model.layers.0.block_sparse_moe.experts.3.w2.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.down_proj",
)
KEPT = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.gate.e_score_correction_bias",
    "model.visual.blocks.0.mlp.gate_proj.weight",
    "visual.blocks.0.attn.proj.weight",
    "model.layers.0.linear_attn.in_proj_ba.weight",
    "model.layers.0.linear_attn.in_proj_a.weight",
    "model.layers.0.linear_attn.in_proj_b.weight",
    "model.layers.0.linear_attn.conv1d.weight",
    "model.layers.0.linear_attn.norm.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.mlp.experts.gate_up_proj_bias",
    "model.layers.0.mlp.router.weight",
)


def test_engines_and_config_name_the_same_precisions() -> None:
    assert list(PRECISIONS) == list(WeightPrecision)


def test_linear_layers_of_the_decoder_are_quantised() -> None:
    assert all(map(is_quantized, QUANTIZED))
    assert not any(map(is_quantized, KEPT))


@pytest.mark.parametrize("precision", list(WeightPrecision))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (160, 96), (300, 416)])
def test_sizes_are_those_of_the_tensors(precision: WeightPrecision, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensors = encode_weight("w", torch.randn(shape).to(dtype), precision)
    expected = quantized_bytes(*shape, precision=precision, dtype_bytes=dtype.itemsize)
    assert sum(tensor.nbytes for tensor in tensors.values()) == expected


@pytest.mark.parametrize("family", names_with("megatron"))
def test_of_every_family_all_large_matrices_are_quantised(family: str) -> None:
    names = load_families()[family].hf_names
    assert names is not None
    layers = [
        *names.layer_weights(0, num_experts=0),
        *names.layer_weights(0, num_experts=1, is_linear=bool(names.linear_attention)),
    ]
    kept = {name for weight, _ in layers for name in weight.hf if not is_quantized(name)}
    small = (
        r".*(norm[.]weight|bias|[.]sinks|gate[.]weight|router[.]weight|conv1d[.]weight|A_log|in_proj_(ba|a|b)[.]weight)"
    )
    assert [name for name in kept if not re.fullmatch(small, name)] == []


def test_names_and_shapes_are_those_of_the_formats() -> None:
    def layout(precision: WeightPrecision) -> dict[str, tuple[torch.dtype, list[int]]]:
        tensors = encode_weight("a.weight", torch.randn(256, 384).bfloat16(), precision)
        return {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}

    assert layout(WeightPrecision.fp8) == {
        "a.weight": (torch.float8_e4m3fn, [256, 384]),
        "a.weight_scale_inv": (torch.float32, [2, 3]),
    }
    assert layout(WeightPrecision.int4) == {
        "a.weight_packed": (torch.int32, [256, 48]),
        "a.weight_scale": (torch.bfloat16, [256, 12]),
        "a.weight_shape": (torch.int64, [2]),
    }
    assert quantization_config("fp8")["weight_block_size"] == [128, 128]
    assert quantization_config("int4")["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_a_width_that_groups_do_not_divide_names_the_weight() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: .* multiple of 32, got 40"):
        encode_weight("model.layers.0.mlp.up_proj.weight", torch.zeros(8, 40), WeightPrecision.int4)


@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_stacked_experts_have_the_values_of_single_ones(precision: WeightPrecision) -> None:
    stacked_EIO = torch.randn(3, 160, 96)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    dense = QuantizedWeight(name, stacked_EIO, precision).dense()
    assert dense.shape == stacked_EIO.shape
    for of_stack, one in zip(dense, stacked_EIO, strict=True):
        assert torch.equal(of_stack.T, QuantizedWeight("a.weight", one.T.contiguous(), precision).dense())


def test_engines_are_told_which_layers_keep_their_dtype() -> None:
    kept = quantization_config("fp8")["modules_to_not_convert"]
    ignored = [each.removeprefix("re:") for each in quantization_config("int4")["ignore"]]
    for name in ("model.layers.0.linear_attn.in_proj_ba", "model.visual.blocks.0.attn.qkv_proj", "lm_head"):
        assert any(part in kept for part in name.split("."))
        assert any(re.fullmatch(pattern, name) for pattern in ignored)
    for name in QUANTIZED:
        module = name.removesuffix(".weight")
        assert not any(part in kept for part in module.split("."))
        assert not any(re.fullmatch(pattern, module) for pattern in ignored)
