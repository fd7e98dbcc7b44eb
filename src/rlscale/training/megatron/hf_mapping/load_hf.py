"""Loads the weights of a Hugging Face folder into this rank's shard of a model, tensor by tensor."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rlscale.errors import DataError
from rlscale.training.megatron.hf_mapping.bridge import load_by_bridge
from rlscale.training.megatron.hf_mapping.mapping import (
    EMBEDDING,
    OUTPUT_LAYER,
    OWN_PREFIX,
    MappedWeight,
    head_sizes,
    map_weights,
    shard_of_rank,
)
from rlscale.training.megatron.hf_mapping.sharding import SliceReader, shard_from_hf
from rlscale.training.megatron.model.megatron_model import MegatronModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EXPERT_BIAS = ".e_score_correction_bias"
"""Suffix of tensors that are float32 whatever the dtype of the others is."""
_EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<j>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")


@torch.no_grad()
def load_hf(model: MegatronModel, path: str) -> None:
    """Fills every weight of this rank. Each rank reads its own slices; a collective with mbridge only.

    Args:
        model: from `build_model`.
        path: Hugging Face folder or hub id, with safetensors.

    Raises:
        DataError: a tensor is missing or has another shape.
    """
    if model.uses_bridge:
        load_by_bridge(model, path)
        return
    checkpoint = HfCheckpoint(path)
    by_name = {mapped.weight.megatron: mapped for mapped in map_weights(model.architecture)}
    sizes = head_sizes(model.architecture)
    if model.architecture.is_tied:
        # The last pipeline stage holds a copy of the embedding as its output layer.
        by_name[OUTPUT_LAYER] = by_name[EMBEDDING]
    for name, weight in model.named_weights():
        if name.startswith(OWN_PREFIX):
            continue
        assert name in by_name, f"the table of {model.architecture.family} has no weight {name}"
        mapped = by_name[name]
        sources = [checkpoint.source(each, stacked_at=_stacked_at(mapped)) for each in mapped.weight.hf]
        found = shard_from_hf(mapped.weight.layout, sources, shard=shard_of_rank(mapped), sizes=sizes)
        if found.shape != weight.shape:
            shapes = f"{tuple(found.shape)} instead of {tuple(weight.shape)} for {name}"
            raise DataError(f"{path} must contain {mapped.weight.hf[0]} of this model, got {shapes}; check config.json")
        weight.copy_(found)


class HfCheckpoint:
    """The safetensors of a folder or hub id, read on request."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._handles: dict[str, Any] = {}

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor -> file."""
        folder = Path(self.path)
        if not folder.is_dir():
            return _files_of_hub(self.path)
        index = folder / _INDEX
        if index.is_file():
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: str(folder / file) for name, file in names.items()}
        if not (folder / _SINGLE).is_file():
            raise DataError(
                f"{folder} must contain {_INDEX} or {_SINGLE}, got neither; convert its weights to safetensors"
            )
        return dict.fromkeys(self._open(str(folder / _SINGLE)).keys(), str(folder / _SINGLE))

    def source(self, name: str, *, stacked_at: int | None = None) -> SliceReader:
        """A reader of one tensor. A matrix of an expert may also be a part of one tensor for all experts.

        A decoder without its vision tower may have the names of the published model.

        Args:
            name: of the tensor.
            stacked_at: expert whose part is read, transposed, of a tensor as in `Weight.stacked`; None: all of it.

        Raises:
            DataError: the tensor is missing.
        """
        stored = self._stored_name(name)
        if stored in self.files:
            tensor = self._open(self.files[stored]).get_slice(stored)
            if stacked_at is not None:
                return _transposed_expert(tensor, j=stacked_at)
            return SliceReader(
                shape=tuple(tensor.get_shape()), rows=lambda some: tensor[some], columns=lambda some: tensor[:, some]
            )
        expert = _EXPERT.fullmatch(name)
        fused = expert and self._stored_name(
            f"{expert['experts']}.{'down' if expert['matrix'] == 'down' else 'gate_up'}_proj"
        )
        if not expert or fused not in self.files:
            raise DataError(
                f"{self.path} must contain {name}, got no such tensor; check that config.json belongs to this model"
            )
        return _one_expert(self._open(self.files[fused]).get_slice(fused), j=int(expert["j"]), matrix=expert["matrix"])

    def _stored_name(self, name: str) -> str:
        # transformers keeps this prefix when it writes the decoder that it has loaded from such a model.
        published = name.replace("model.", "model.language_model.", 1)
        return published if name not in self.files and published in self.files else name

    def tensor(self, name: str) -> Tensor:
        """One tensor, whole."""
        found: Tensor = self._open(self.files[name]).get_tensor(name)
        return found

    def dtypes(self) -> set[str]:
        """The dtypes of all tensors as safetensors names them, e.g. `F32`, without those that are always float32."""
        return {
            str(self._open(file).get_slice(name).get_dtype())
            for name, file in self.files.items()
            if not name.endswith(_EXPERT_BIAS)
        }

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt")
        return self._handles[file]


def _stacked_at(mapped: MappedWeight) -> int | None:
    return mapped.expert if mapped.weight.stacked else None


def _transposed_expert(stacked: Any, *, j: int) -> SliceReader:
    """A reader of expert `j` in [experts, columns, rows] or [experts, rows]."""
    _, *shape = stacked.get_shape()

    # As below: a slice of length 1 instead of an index.
    def some_rows(some: slice) -> Tensor:
        found: Tensor = (stacked[j : j + 1, :, some] if len(shape) == 2 else stacked[j : j + 1, some])[0]
        return found.T if len(shape) == 2 else found

    def some_columns(some: slice) -> Tensor:
        found: Tensor = stacked[j : j + 1, some][0]
        return found.T

    return SliceReader(shape=tuple(reversed(shape)), rows=some_rows, columns=some_columns)


def _one_expert(stacked: Any, *, j: int, matrix: str) -> SliceReader:
    """A reader of a matrix of expert `j` in [experts, rows, columns]. Gate and up projection are stacked by rows."""
    _, rows, columns = stacked.get_shape()
    first = 0
    if matrix != "down":
        rows //= 2
        first = rows if matrix == "up" else 0

    # A slice of length 1 instead of an index: safetensors slices an axis, it does not drop it.
    def some_rows(some: slice) -> Tensor:
        start, stop, _ = some.indices(rows)
        found: Tensor = stacked[j : j + 1, first + start : first + stop]
        return found[0]

    def some_columns(some: slice) -> Tensor:
        found: Tensor = stacked[j : j + 1, first : first + rows, some]
        return found[0]

    return SliceReader(shape=(rows, columns), rows=some_rows, columns=some_columns)


def _files_of_hub(path: str) -> dict[str, str]:
    """Tensor -> file of a hub id. Downloads files that are not in the local cache."""
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        single = cached_file(path, _SINGLE)
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), str(single))
    files, metadata = get_checkpoint_shard_files(path, index)  # type: ignore[no-untyped-call]
    by_name = {Path(file).name: str(file) for file in files}
    return {name: by_name[file] for name, file in metadata["weight_map"].items()}
