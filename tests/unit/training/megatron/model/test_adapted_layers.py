"""Adapters of fused and divided layers: merged shards are the shards of the merged Hugging Face weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlscale.architectures.weight_names import TensorLayout
from rlscale.training.megatron.hf_mapping.adapter_mapping import map_adapters
from rlscale.training.megatron.hf_mapping.sharding import HeadSizes, Shard, SliceReader, shard_from_hf
from rlscale.training.megatron.model.adapted_layers import (
    AdapterSettings,
    LayerAdapters,
    Projections,
    adapt_layer,
    adapters_off,
)

SIZES = HeadSizes(num_groups=4, queries_per_group=3, vocab_size=10, padded_vocab_size=12)
RANK, WIDTH, SCALE = 2, 8, 0.5
ROWS = {
    TensorLayout.qkv: {"q_proj": 24, "k_proj": 8, "v_proj": 8},
    TensorLayout.gated: {"gate_proj": 12, "up_proj": 12},
    TensorLayout.gated_fused: {"gate_up_proj": 24},
    TensorLayout.rows: {"q_b_proj": 12},
    TensorLayout.columns: {"o_proj": 12},
    TensorLayout.whole: {"kv_a_proj_with_mqa": 12},
}
CONFIG: Any = SimpleNamespace(sequence_parallel=True)


def shard(layout: TensorLayout, *full: Tensor, index: int = 0, count: int = 1) -> Tensor:
    readers = [SliceReader.from_tensor(each) for each in full]
    return shard_from_hf(layout, readers, shard=Shard(index=index, count=count), sizes=SIZES)


def halves(layout: TensorLayout) -> tuple[TensorLayout, TensorLayout]:
    """Layouts of A and B, as `map_adapters` gives them."""
    if layout == TensorLayout.columns:
        return layout, TensorLayout.whole
    is_divided = layout in (TensorLayout.whole, TensorLayout.gated_fused)
    return TensorLayout.whole, layout if is_divided else TensorLayout.rows


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_merged_shard_is_the_shard_of_the_merged_weights(layout: TensorLayout, count: int, is_partial: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(rows, WIDTH, generator=generator) for name, rows in ROWS[layout].items()}
    adapted = list(weights)[-1:] if is_partial else list(weights)
    a = {name: torch.randn(RANK, WIDTH, generator=generator) for name in adapted}
    b = {name: torch.randn(len(weights[name]), RANK, generator=generator) for name in adapted}
    merged = [weight + SCALE * b[n] @ a[n] if n in adapted else weight for n, weight in weights.items()]
    of_a, of_b = halves(layout)
    for i in range(count):
        own = shard(layout, *weights.values(), index=i, count=count)
        adapters = LayerAdapters(
            {n: (shard(of_a, a[n], index=i, count=count), shard(of_b, b[n], index=i, count=count)) for n in adapted},
            projections=Projections.from_layer(
                layout, list(weights), num_rows=len(own), num_groups=SIZES.num_groups // count, queries_per_group=3
            ),
            scale=SCALE,
            config=CONFIG,
        )
        with torch.no_grad():
            torch.testing.assert_close(adapters.merge(own), shard(layout, *merged, index=i, count=count))


@pytest.mark.parametrize("layout", ROWS)
def test_megatron_sums_the_gradients_of_whole_halves_only(layout: TensorLayout) -> None:
    name, rows = next(iter(ROWS[layout].items()))
    parts = {name: (torch.zeros(RANK, WIDTH), torch.zeros(rows, RANK))}
    projections = Projections.from_layer(layout, list(ROWS[layout]), num_rows=40, num_groups=4, queries_per_group=3)
    adapters = LayerAdapters(parts, projections=projections, scale=SCALE, config=CONFIG)
    found = {
        half.split(".")[-1]: (getattr(p, "tensor_model_parallel", False), getattr(p, "sequence_parallel", False))
        for half, p in adapters.named_parameters()
    }
    of_a, of_b = ((each != TensorLayout.whole, each == TensorLayout.whole) for each in halves(layout))
    assert found == {"a": of_a, "b": of_b}


class PlainLinear(nn.Linear):
    """A replicated layer that returns an output and a bias, as those of Megatron-core do."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(input_), None


class NormalisedLinear(PlainLinear):
    """The same with a norm after the product."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return self.project(input_)[0].tanh(), None

    def project(self, input_: Tensor) -> tuple[Tensor, None]:
        return super().forward(input_)


@pytest.mark.parametrize("kind", [PlainLinear, NormalisedLinear])
@torch.no_grad()
def test_a_layer_with_adapters_computes_with_the_merged_weight(kind: type[PlainLinear]) -> None:
    torch.manual_seed(0)
    layer, x = kind(WIDTH, 5, bias=False), torch.randn(3, WIDTH)
    plain = layer(x)[0]
    parts = {"o_proj": (torch.randn(RANK, WIDTH), torch.randn(5, RANK))}
    projections = Projections(layout=TensorLayout.whole, widths={"o_proj": 5})
    adapt_layer(layer, LayerAdapters(parts, projections=projections, scale=SCALE, config=CONFIG))
    merged = kind(WIDTH, 5, bias=False)
    assert isinstance(layer.adapters, LayerAdapters) and isinstance(layer, kind)
    merged.weight.copy_(layer.adapters.merge(layer.weight))
    torch.testing.assert_close(layer(x)[0], merged(x)[0])
    with adapters_off([layer]):
        assert torch.equal(layer(x)[0], plain)
    assert not torch.equal(layer(x)[0], plain)


@torch.no_grad()
def test_a_layer_of_torch_with_adapters_returns_the_output_alone() -> None:
    layer, x = nn.Linear(WIDTH, 5), torch.randn(3, WIDTH)
    plain, a, b = layer(x), torch.randn(RANK, WIDTH), torch.randn(5, RANK)
    projections = Projections(layout=TensorLayout.whole, widths={"qkv": 5})
    adapt_layer(layer, LayerAdapters({"qkv": (a, b)}, projections=projections, scale=SCALE, config=CONFIG))
    torch.testing.assert_close(layer(x), plain + SCALE * x @ a.T @ b.T)
    with adapters_off([layer]):
        assert torch.equal(layer(x), plain)


def test_every_projection_has_its_adapter_under_the_names_of_peft() -> None:
    transformer = SimpleNamespace(
        multi_latent_attention=False,
        moe_layer_freq=1,
        num_layers=2,
        num_moe_experts=None,
        q_lora_rank=None,
        mtp_num_layers=None,
    )
    architecture = SimpleNamespace(
        family="glm4",
        transformer=transformer,
        is_tied=False,
        architecture=SimpleNamespace(missing_features=frozenset(), linear_layers=()),
    )
    layers = ("model.layers.1.self_attn.k_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.0.mlp.down_proj")
    model: Any = SimpleNamespace(architecture=architecture, adapters=AdapterSettings(rank=RANK, alpha=4, layers=layers))
    found = [(each.weight.megatron, *each.weight.hf, each.weight.layout) for each in map_adapters(model)]
    fc2 = "decoder.layers.0.mlp.linear_fc2.adapters.down_proj"
    qkv, fc1 = "decoder.layers.1.self_attention.linear_qkv.adapters.k_proj", "decoder.layers.1.mlp.linear_fc1.adapters"
    peft = "base_model.model.model.layers"
    assert found == [
        (f"{fc2}.a", f"{peft}.0.mlp.down_proj.lora_A.weight", TensorLayout.columns),
        (f"{fc2}.b", f"{peft}.0.mlp.down_proj.lora_B.weight", TensorLayout.whole),
        (f"{qkv}.a", f"{peft}.1.self_attn.k_proj.lora_A.weight", TensorLayout.whole),
        (f"{qkv}.b", f"{peft}.1.self_attn.k_proj.lora_B.weight", TensorLayout.rows),
        (f"{fc1}.gate_up_proj.a", f"{peft}.1.mlp.gate_up_proj.lora_A.weight", TensorLayout.whole),
        (f"{fc1}.gate_up_proj.b", f"{peft}.1.mlp.gate_up_proj.lora_B.weight", TensorLayout.gated_fused),
    ]
    assert model.adapters.scale == 2 and model.adapters.peft_config["target_modules"] == [
        "down_proj",
        "gate_up_proj",
        "k_proj",
    ]
