"""Weights of a Hugging Face checkpoint by the names of transformers' model, of which a rank reads only its rows.

    files ─ mapped into memory ─ renamed as transformers does ─ rows of this rank ─ cast while they are copied

transformers stacks the matrices of the experts of a layer in one parameter: a rank stacks only its experts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from rlscale.errors import ConfigError
from rlscale.models.hf_models import build_causal_lm, checkpoint_problem, load_causal_lm
from rlscale.models.safetensors_files import MappedFiles

BLOCK_BYTES = 2**26
"""Bytes that are copied at a time: a copy to a GPU, or with another dtype, may need a buffer of this size."""


@dataclass(kw_only=True, slots=True)
class _Source:
    """Tensors of the files that one parameter is made of."""

    target: str  # the name under which transformers collects them; the first of several parameters
    converter: WeightConverter | None  # None: one tensor, as it is
    tensors: dict[str, list[str]] = field(default_factory=dict)  # names in the files, in order, by source pattern

    @property
    def first_key(self) -> str:
        """Name in the files of the only tensor, or of the first of equal ones."""
        return next(iter(self.tensors.values()))[0]


class HfWeights:
    """The weights of one checkpoint for one model. No collective.

    Args:
        path: Hugging Face folder or hub id.
        model: its parameters may be on the meta device. It learns the conversions that its weights need when they are
            published again.

    Raises ConfigError for a checkpoint without safetensors files.

    Example:
        weights = HfWeights(path, model)
        weights.check(["model.norm.weight"])
        weights.copy_rows("model.norm.weight", shard, first=512)
    """

    def __init__(self, path: str, model: PreTrainedModel) -> None:
        self._path, self._model = path, model
        try:
            self._files = MappedFiles(find_weight_files(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                [checkpoint_problem("be a checkpoint that transformers can load", path, error)]
            ) from error
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._sources = self._map_names()
        for alias, name in model.all_tied_weights_keys.items():
            # A tied weight may be in the files under any of its names.
            for one, other in ((name, alias), (alias, name)):
                if one not in self._sources and other in self._sources:
                    self._sources[one] = self._sources[other]

    def check(self, names: Collection[str]) -> None:
        """Raises ConfigError unless all these parameters are in the files, with the shapes of the model."""
        missing = sorted(name for name in names if name not in self._sources)
        if missing:
            # Otherwise they would keep the content of empty memory.
            text = f"{len(missing)} weights are missing, the first is {missing[0]}"
            raise ConfigError([checkpoint_problem("contain every weight of its architecture", self._path, text)])
        for name in names:
            source = self._sources[name]
            if source.converter is None:
                key = source.first_key
                found, wanted = self._files.tensor(key).shape, self._shapes[name]
                if found != wanted:
                    text = f"{key} has the shape {tuple(found)} instead of {tuple(wanted)}; check its config.json"
                    raise ConfigError([checkpoint_problem("have the shapes of its architecture", self._path, text)])

    def ties(self, alias: str, name: str) -> bool:
        """Returns whether two names may share one parameter: not both are in the files with different values."""
        if alias not in self._sources or name not in self._sources or self._sources[alias] is self._sources[name]:
            return True
        one, other = (self._read(each, first=0, stop=self._shapes[name][0]) for each in (alias, name))
        return torch.equal(one, other)

    @torch.no_grad()
    def copy_rows(self, name: str, target: Tensor, *, first: int) -> None:
        """Copies the rows from `first` on, as many as `target` has, and casts them to its dtype.

        Args:
            name: of a parameter or buffer in the model.
            target: on any device.
            first: 0 for a tensor without dimensions.
        """
        if target.numel() == 0:
            return
        if target.dim() == 0:
            target.copy_(self._read(name, first=0, stop=1))
            return
        rows = self._read(name, first=first, stop=first + target.shape[0])
        assert rows.shape == target.shape, f"{name} has rows of shape {tuple(rows.shape)}, not {tuple(target.shape)}"
        per_block = max(1, BLOCK_BYTES * target.shape[0] // target.nbytes)
        for start in range(0, target.shape[0], per_block):
            target[start : start + per_block].copy_(rows[start : start + per_block])

    def _read(self, name: str, *, first: int, stop: int) -> Tensor:
        """Rows of a parameter in the dtype of the files."""
        source = self._sources[name]
        if source.converter is None:
            tensor = self._files.tensor(source.first_key)
            return tensor[first:stop] if tensor.dim() else tensor
        if _stacks_rows(source.converter):
            # Row i comes from the i-th tensor of every pattern alone.
            return self._convert(source, name, first=first, stop=stop)
        return self._convert(source, name, first=0, stop=None)[first:stop]

    def _convert(self, source: _Source, name: str, *, first: int, stop: int | None) -> Tensor:
        converter = deepcopy(source.converter)
        assert converter is not None, "the caller found one"
        for pattern, keys in source.tensors.items():
            for key in keys[first:stop]:
                converter.add_tensor(source.target, key, pattern, self._files.tensor(key))  # type: ignore[arg-type]
        made: Mapping[str, Any] = converter.convert(source.target, model=self._model, config=self._model.config)
        tensor = made[name]
        result: Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return result

    def _map_names(self) -> dict[str, _Source]:
        """Sources by parameter: the renaming of transformers' own loading."""
        model, wanted = self._model, self._shapes
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, state = model.base_model_prefix, model.state_dict()
        sources: dict[str, _Source] = {}
        for key in sorted(self._files.names, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in wanted and key in wanted:
                name, pattern = key, None
            if name not in wanted:
                continue  # e.g. layers that predict further tokens, which the model does not have
            converter = None if pattern is None else by_pattern[pattern]
            source = sources.get(name)
            if source is None:
                source = _Source(target=name, converter=converter)
                for each in _all_targets(name, converter):
                    sources[each] = source
            source.tensors.setdefault(pattern or key, []).append(key)
        # As `from_pretrained` leaves it: the conversions that saving must revert.
        model._weight_conversions = [each for each in transforms if each.was_used()]  # type: ignore[assignment]
        return sources


def open_causal_lm(path: str, *, attn_implementation: str) -> tuple[PreTrainedModel, HfWeights | None]:
    """Builds a model in float32 without its weights, and opens its files.

    Returns:
        The model with its parameters on the meta device, and the weights to copy into them. None: the files are
        quantised, and transformers has loaded all weights into the host memory of this process.

    Raises:
        ConfigError: as `load_causal_lm`; missing weights are found by `HfWeights.check`.
    """
    model = build_causal_lm(path, dtype=torch.float32, attn_implementation=attn_implementation)
    if getattr(model.config, "quantization_config", None) is not None:
        return load_causal_lm(path, dtype=torch.float32, attn_implementation=attn_implementation), None
    weights = HfWeights(path, model)
    for alias, name in list(model.all_tied_weights_keys.items()):
        if not weights.ties(alias, name):
            # As transformers does: the config is wrong, the files count.
            model.all_tied_weights_keys.pop(alias)
            owner, _, part = alias.rpartition(".")
            layer = model.get_submodule(owner)
            setattr(layer, part, nn.Parameter(torch.empty_like(layer.get_parameter(part))))
    return model, weights


def find_weight_files(path: str) -> list[Path]:
    """Returns the safetensors files of a folder or hub id. Raises OSError where there are none."""
    single, index = _find(path, SAFE_WEIGHTS_NAME), _find(path, SAFE_WEIGHTS_INDEX_NAME)
    if single is not None:
        return [single]
    if index is None:
        raise OSError(f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = [(name, _find(path, name)) for name in names]
    missing = [name for name, file in files if file is None]
    if missing:
        raise OSError(f"its index names {missing[0]}, which does not exist")
    return [file for _, file in files if file is not None]


def _find(path: str, name: str) -> Path | None:
    folder = Path(path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _stacks_rows(converter: WeightConverter) -> bool:
    """Whether row i of the result depends on the i-th tensor of each source alone, as with stacked experts."""
    first, *others = converter.operations
    stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0  # type: ignore[attr-defined]
    return stacks and all(type(each).__name__ == "Concatenate" and each.dim > 0 for each in others)  # type: ignore[attr-defined]


def _all_targets(name: str, converter: WeightConverter | None) -> list[str]:
    """The parameters that a converter makes next to `name`, which contains its first target pattern."""
    if converter is None:
        return [name]
    first, *others = converter.target_patterns
    return [name, *(name.replace(first, other) for other in others)]
