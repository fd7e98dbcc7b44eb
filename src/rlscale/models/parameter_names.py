"""Names of a model's parameters, without torch: from its safetensors, or from the architecture of a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family, load_families
from rlscale.architectures.hf_config import hf_fields, tiny_model_fields
from rlscale.architectures.vision import VisionFamily
from rlscale.architectures.weight_names import Weight
from rlscale.models.model_path import WEIGHT_FILES

_SINGLE, _INDEX = WEIGHT_FILES
_MAX_HEADER_BYTES = 100 << 20
_EXPERT = re.compile(
    r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(?:(gate_proj|up_proj|w1|w3)|down_proj|w2)\.weight"
)
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_DECODER = "model.language_model."
_BUFFERS = (".e_score_correction_bias", ".inv_freq")
"""Tensors of a checkpoint that are no parameters."""


def folder_parameters(folder: Path, config_json: Mapping[str, Any]) -> list[str] | None:
    """The parameters of a model folder; None: not known without transformers.

    Only of known families: transformers renames tensors of others when it reads them.
    """
    family = load_families().get(str(config_json.get("model_type")))
    # Towers have other names in files than in memory, which transformers changes. Published files of families with
    # gated delta nets also have a tower, or layers for multi-token prediction, that transformers skips.
    if family is None or family.vision or family.delta_net:
        return None
    names = _tensor_names(folder)
    return None if names is None else in_memory(names, is_tied=bool(config_json.get("tie_word_embeddings")))


def tiny_parameters(build: str, given: Mapping[str, Any]) -> list[str] | None:
    """The parameters of a model of `model.build`; None: not known without transformers.

    Args:
        given: values of the config group `model`. None: the default.
    """
    fields = tiny_model_fields(build) | {name: value for name, value in given.items() if value is not None}
    family = find_family(fields["model_type"])
    names = family.hf_names
    if names is None or family.vision is not None:  # the table has no tower
        return None
    without = Architecture.from_fields(fields).missing_features
    weights: list[Weight] = list(names.before)
    for layer in range(int(fields["num_layers"])):
        # One expert stands for all: in memory a layer has one tensor for the same matrix of all its experts.
        has_experts = "num_experts" in hf_fields(fields) and layer >= int(fields.get("first_k_dense_replace") or 0)
        own = names.layer_weights(layer, num_experts=int(has_experts), without=without)
        weights += [weight for weight, _ in own]
    weights += names.after
    tensors = [name for weight in weights for name in weight.hf]
    return in_memory(tensors, is_tied=bool(fields["tie_word_embeddings"]))


def merged_by_megatron(names: Iterable[str], model_type: object) -> list[list[str]]:
    """The groups of `names` that Megatron-core keeps in one parameter each; none for a family that it does not train.

    Args:
        names: of parameters, as transformers names them.
        model_type: of `config.json`.
    """
    family, vision = find_family(model_type).hf_names, find_family(model_type).vision
    given, groups = set(names), []
    layers = sorted({int(found[1]) for name in given if (found := _LAYER.match(name))})
    for layer in layers if family is not None else ():
        assert family is not None, "checked above"
        # Every kind of layer: names that the model does not have are skipped below.
        weights = (
            weight
            for num_experts, is_linear in product((0, 1), (False, True))
            for weight, _ in family.layer_weights(layer, num_experts=num_experts, is_linear=is_linear)
        )
        for weight in weights:
            group = [name for name in in_memory(weight.hf, is_tied=False, vision=vision) if name in given]
            if len(group) > 1 and group not in groups:
                groups.append(group)
    return groups


def in_memory(tensors: Sequence[str], *, is_tied: bool, vision: VisionFamily | None = None) -> list[str]:
    """Names that transformers gives to the parameters of these tensors; `vision` is that of their family."""
    # A decoder whose published files have a tower that is not loaded has no prefix in memory.
    tensors = [name.replace(_DECODER, "model.") if vision is None else vision.in_memory(name) for name in tensors]
    return list(dict.fromkeys(_parameter_names(tensors, is_tied=is_tied)))


def _parameter_names(tensors: Sequence[str], *, is_tied: bool) -> Iterator[str]:
    for name in tensors:
        if name.endswith(_BUFFERS) or (is_tied and name == "lm_head.weight"):
            continue
        # transformers 5 joins the matrices of a layer's experts, and gate and up projections.
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            yield f"{expert[1]}.mlp.experts.{'gate_up_proj' if expert[2] else 'down_proj'}"
        else:
            yield name.replace(".block_sparse_moe.", ".mlp.")


def _tensor_names(folder: Path) -> list[str] | None:
    """Names in the index of a folder, or in the header of its only file; None: neither can be read."""
    try:
        if (folder / _INDEX).is_file():
            return list(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        # A header of JSON follows its length, eight bytes.
        with (folder / _SINGLE).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, KeyError):
        return None
    return [name for name in header if name != "__metadata__"] or None
