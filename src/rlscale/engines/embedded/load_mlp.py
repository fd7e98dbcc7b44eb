"""Loads the MLP of a decoder layer: dense, or with experts under the names of its family."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlscale.architectures.family import Family, find_family
from rlscale.engines.embedded.dense_mlp import DenseMlp
from rlscale.engines.embedded.expert_mlp import ExpertMlp, Experts
from rlscale.engines.embedded.expert_router import ExpertRouter
from rlscale.engines.embedded.expert_weights import ClampedExperts, GatedExperts
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.quantized_linear import QuantizedStack

Names = dict[str, tuple[str, ...]]
"""Weight of a layer, as Megatron-core names it within the layer -> its Hugging Face names."""


def load_mlp(loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> DenseMlp | ExpertMlp:
    """Loads the MLP of one layer.

    Args:
        loader: of the weights.
        prefix: of the names of the layer, e.g. `model.layers.0.`.
        config: of the model.
        index: of the layer.
    """
    if config.routing is not None:
        family = find_family(config.raw.get("model_type"))
        names = _expert_names(family, prefix, index, num_experts=config.routing.num_experts)
        # A model may have experts in some layers only.
        if any(name in loader for name in names.get("mlp.router.weight", ())):
            return _load_experts(loader, names, config)
    # GLM-4 has both projections in one tensor.
    fused = f"{prefix}mlp.gate_up_proj"
    gate_up = [fused] if f"{fused}.weight" in loader else [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
    return DenseMlp(loader.linear(gate_up), loader.linear([f"{prefix}mlp.down_proj"]))


def _expert_names(family: Family, prefix: str, index: int, *, num_experts: int) -> Names:
    if family.hf_names is None:
        return {}
    return {
        weight.megatron.removeprefix(f"decoder.layers.{index}."): tuple(
            prefix + name.partition(f".layers.{index}.")[2] for name in weight.hf
        )
        for weight, _ in family.hf_names.layer_weights(index, num_experts=num_experts)
    }


def _load_experts(loader: WeightLoader, names: Names, config: DecoderConfig) -> ExpertMlp:
    assert config.routing is not None, "called only for a model with experts"
    router = ExpertRouter(
        config.routing,
        loader.load(names["mlp.router.weight"][0]),
        bias=_load_named(loader, names, "mlp.router.bias"),
        choice_bias=_load_named(loader, names, "mlp.router.expert_bias"),
    )
    shared = None
    layers = [name.removesuffix(".weight") for name in names.get("mlp.shared_experts.linear_fc1.weight", ())]
    if layers and f"{layers[0]}.weight" in loader:
        down = names["mlp.shared_experts.linear_fc2.weight"][0].removesuffix(".weight")
        shared = DenseMlp(loader.linear(layers), loader.linear([down]))
    gate = _load_named(loader, names, "mlp.shared_experts.gate_weight")
    return ExpertMlp(router, _load_all_experts(loader, names, config), shared, shared_gate=gate)


def _load_all_experts(loader: WeightLoader, names: Names, config: DecoderConfig) -> Experts:
    assert config.routing is not None, "called only for a model with experts"
    expert = "mlp.experts.local_experts.{}.linear_{}"
    if config.clamped_gate is not None:
        matrices, biases = (
            {name.rpartition(".")[2]: name for name in (names[expert.format(0, f"{fc}.{kind}")][0] for fc in _LAYERS)}
            for kind in ("weight", "bias")
        )
        return ClampedExperts(
            {short: _load_stack(loader, name) for short, name in matrices.items()},
            {short: loader.load(name) for short, name in biases.items()},
            config.clamped_gate,
        )
    parts = [
        (*names[expert.format(j, "fc1.weight")], *names[expert.format(j, "fc2.weight")])
        for j in range(config.routing.num_experts)
    ]
    if loader.is_quantized:
        quantized = [(loader.quantize(g), loader.quantize(u), loader.quantize(d)) for g, u, d in parts]
        return GatedExperts.from_quantized(quantized)
    experts, views = GatedExperts.from_dense([(loader.load(g), loader.load(u), loader.load(d)) for g, u, d in parts])
    loader.replace([name for each in parts for name in each], views)
    return experts


_LAYERS = ("fc1", "fc2")


def _load_stack(loader: WeightLoader, name: str) -> Callable[[], Tensor]:
    """Loads a tensor that is stacked over all experts of a layer. The result returns it."""
    if loader.is_quantized:
        return QuantizedStack([loader.quantize(name)])
    loaded = loader.load(name)
    return lambda: loaded


def _load_named(loader: WeightLoader, names: Names, weight: str) -> Tensor | None:
    found = names.get(weight)
    return None if found is None else loader.load(found[0])
