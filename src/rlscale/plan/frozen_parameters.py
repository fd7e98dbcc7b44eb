"""Parameters of a model by their names in transformers, and those that the patterns of the config freeze."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from rlscale.architectures.architecture import Architecture, Shape
from rlscale.architectures.family import find_family
from rlscale.architectures.tower_shape import PREFIX
from rlscale.architectures.vision_parts import expand_word
from rlscale.config import TrainConfig
from rlscale.plan.mtp_layers import named_own_shapes


class ModelPart(StrEnum):
    """Part of a model."""

    decoder = "decoder"
    projector = "projector"  # of a vision tower: its mergers
    tower = "tower"
    mtp = "mtp"  # layers for multi-token prediction


class Scope(StrEnum):
    """Parameters that are gathered and reduced together."""

    model = "model"
    root = "root"  # outside of layers and blocks
    layers = "layers"
    blocks = "blocks"  # of the vision tower


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedParameter:
    """A parameter, as transformers names it; of a layer's experts one matrix of all."""

    name: str
    shape: Shape
    part: ModelPart
    layer: int | None = None  # of the decoder, or block of the tower; None: outside of both
    is_expert: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def scope(self) -> Scope:
        """The smallest scope with this parameter."""
        if self.layer is None:
            return Scope.root
        return Scope.blocks if self.part == ModelPart.tower else Scope.layers


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenParameters:
    """The parameters that the patterns freeze. By default none."""

    parameters: tuple[NamedParameter, ...] = ()
    first_layer: int = 0  # of the decoder, with a backward pass
    tower_blocks: int = 0  # last ones of the vision tower with a backward pass

    def of_parts(self, *parts: ModelPart) -> list[NamedParameter]:
        """Those of some parts. None given: of all but the layers for multi-token prediction."""
        return [each for each in self.parameters if each.part in parts or (not parts and each.part != ModelPart.mtp)]

    def count(self, *parts: ModelPart) -> int:
        """Elements, as `of_parts`."""
        return sum(each.elements for each in self.of_parts(*parts))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of all but the layers for multi-token prediction."""
        return tuple(each.shape for each in self.of_parts())

    @property
    def layer_matrices(self) -> tuple[Shape, ...]:
        """Shapes of the matrices in layers of the decoder."""
        decoder = self.of_parts(ModelPart.decoder)
        return tuple(each.shape for each in decoder if each.layer is not None and len(each.shape) > 1)

    def trained_share(self, a: Architecture, scope: Scope = Scope.model) -> float:
        """Trained elements as a fraction of those of a scope."""
        layers = a.parameters - a.root_parameters - a.tower_block_parameters
        whole = {
            Scope.model: a.parameters,
            Scope.root: a.root_parameters,
            Scope.layers: layers,
            Scope.blocks: a.tower_block_parameters,
        }[scope]
        frozen = sum(each.elements for each in self.of_parts() if scope in (Scope.model, each.scope))
        return 1 - frozen / whole if whole else 0.0


NONE_FROZEN = FrozenParameters()


def find_frozen(a: Architecture, train: TrainConfig, *, num_mtp: int = 0) -> FrozenParameters:
    """The parameters that `train.only_train_params` and `train.freeze_params` freeze; none next to adapters.

    Args:
        num_mtp: layers for multi-token prediction, which the patterns can freeze, too.
    """
    only, frozen = train.only_train_params, train.freeze_params
    blocks = 0 if a.tower is None else a.tower.depth
    if train.lora.rank or (only is None and frozen is None):
        return FrozenParameters(tower_blocks=blocks)
    return _find_frozen(a, None if only is None else tuple(only), tuple(frozen or ()), num_mtp)


@cache
def _find_frozen(
    a: Architecture, only: tuple[str, ...] | None, frozen: tuple[str, ...], num_mtp: int
) -> FrozenParameters:
    found = list_parameters(a, num_mtp=num_mtp)
    trained = [each for each in found if is_trained(each.name, only, frozen)]
    names = {each.name for each in trained}
    # A block saves nothing if neither it nor anything before it is trained.
    towers = [each.layer or 0 for each in trained if each.part == ModelPart.tower]
    layers = [each.layer or 0 for each in trained if each.part == ModelPart.decoder and not _is_last(each)]
    reads = [0] if towers or any(each.part == ModelPart.projector for each in trained) else []
    return FrozenParameters(
        parameters=tuple(each for each in found if each.name not in names),
        first_layer=min([*layers, *reads], default=a.num_layers),
        tower_blocks=a.tower.depth - min(towers) if a.tower is not None and towers else 0,
    )


def is_trained(name: str, only: Iterable[str] | None, frozen: Iterable[str]) -> bool:
    """Whether patterns leave a parameter trained, by its name."""
    if only is not None:
        return any(re.search(expand_word(pattern), name) for pattern in only)
    return not any(re.search(expand_word(pattern), name) for pattern in frozen)


def _is_last(each: NamedParameter) -> bool:
    """Whether a parameter comes after all layers: the final norm, or an output layer that is not the embedding."""
    return each.layer is None and not each.name.endswith("embed_tokens.weight")


@cache
def list_parameters(a: Architecture, *, num_mtp: int = 0) -> tuple[NamedParameter, ...]:
    """All parameters of a model, and those of `num_mtp` layers for multi-token prediction."""
    return (*_decoder(a), *_tower(a), *(_mtp(a, num_mtp) if num_mtp else ()))


def _decoder(a: Architecture) -> Iterator[NamedParameter]:
    # Models with images keep their decoder next to the tower.
    base = "model." if find_family(a.model_type).vision is None else "model.language_model."
    table, part = (a.vocab_size, a.hidden_size), ModelPart.decoder
    yield NamedParameter(name=f"{base}embed_tokens.weight", shape=table, part=part)
    for layer in range(a.num_layers):
        for name, shape in _layer(a, layer):
            where = f"{base}layers.{layer}.{name}"
            yield NamedParameter(name=where, shape=shape, part=part, layer=layer, is_expert=".experts." in name)
    yield NamedParameter(name=f"{base}norm.weight", shape=(a.hidden_size,), part=part)
    if not a.tied:
        yield NamedParameter(name="lm_head.weight", shape=table, part=part)


def _layer(a: Architecture, layer: int) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a decoder layer, in the order of `Architecture.layer_shapes`."""
    attention = [f"self_attn.{name}" for name in _attention_names(a)]
    if a.delta is not None and layer in a.linear_layers:
        named = a.delta.named_shapes(a.hidden_size, by_head=a.has_delta_by_head)
        attention = [f"linear_attn.{name}" for name, _ in named]
    mlp = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    if a.has_experts(layer):
        module = "shared_expert" if a.gated_shared_size else "shared_experts"
        shared = [f"mlp.{module}.{name}_proj.weight" for name in ("gate", "up", "down")]
        mlp = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        if a.sinks:
            stacked = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            mlp = ["mlp.router.weight", "mlp.router.bias", *(f"mlp.experts.{name}" for name in stacked)]
        mlp += shared if a.shared_size else []
        mlp += ["mlp.shared_expert_gate.weight"] if a.gated_shared_size else []
    norms = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    names = [*attention, *mlp, *(f"{name}.weight" for name in norms[: a.num_norms])]
    for name, shape in zip(names, a.layer_shapes(layer), strict=True):
        if a.num_norms < 4:
            yield name, shape
        # GLM-4 has gate and up projection in one matrix.
        elif name == "mlp.gate_proj.weight":
            yield "mlp.gate_up_proj.weight", (2 * shape[0], shape[1])
        elif name != "mlp.up_proj.weight":
            yield name, shape


def _attention_names(a: Architecture) -> Iterator[str]:
    if a.is_latent:
        yield from ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight") if a.q_rank else ("q_proj.weight",)
        yield from ("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight")
    else:
        yield from ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        yield from ("q_proj.bias", "k_proj.bias", "v_proj.bias") if a.attention_bias else ()
        yield from ("q_norm.weight", "k_norm.weight") if a.qk_norm else ()
    yield "o_proj.weight"
    yield from ("o_proj.bias", "sinks") if a.sinks else ()


def _tower(a: Architecture) -> Iterator[NamedParameter]:
    for name, shape in a.tower.named_shapes() if a.tower is not None else ():
        parts = name.removeprefix(PREFIX).split(".")
        part = ModelPart.projector if "merger" in parts[0] else ModelPart.tower
        yield NamedParameter(name=name, shape=shape, part=part, layer=int(parts[1]) if parts[0] == "blocks" else None)


def _mtp(a: Architecture, number: int) -> Iterator[NamedParameter]:
    prefixes = dict.fromkeys(prefix for prefix, _, _ in named_own_shapes(a, number))
    for prefix, name, shape in named_own_shapes(a, number):
        yield NamedParameter(name=f"{prefix}.{name}", shape=shape, part=ModelPart.mtp)
    for prefix in prefixes:
        for name, shape in _layer(a, a.num_layers - 1):
            is_expert = ".experts." in name
            yield NamedParameter(name=f"{prefix}.{name}", shape=shape, part=ModelPart.mtp, is_expert=is_expert)
