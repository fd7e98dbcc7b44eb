"""The option of `model` whose architecture is that of the arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from rapidfuzz.distance import OSA

from rlscale.architectures.family import find_family
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.yaml_files import read_yaml_files
from rlscale.config.keys import keys
from rlscale.config.serialize import flatten
from rlscale.migration.argument_tables import read_table
from rlscale.migration.findings import Kind
from rlscale.migration.foreign_arguments import Argument
from rlscale.migration.settings import Setting, WrongValueError, convert
from rlscale.migration.translation_draft import TranslationDraft

SIZES = ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.vocab_size")
"""Keys that tell models apart; an option must agree with all that are given, and with at least two."""

MAY_DIFFER = frozenset({"model.rotary_base", "model.max_position_embeddings"})
"""Keys that releases of one model change; the experiment then sets them."""


def choose_model(draft: TranslationDraft) -> None:
    """Places the arguments of the architecture: in an option of `model`, or as its keys."""
    table = read_table(draft.reading.project)
    given: dict[str, tuple[Argument, Setting]] = {}
    for argument in draft.reading.arguments:
        row = table.get(argument.name)
        if argument.index in draft.places or row is None or row.conversion != "model":
            continue
        try:
            given[row.key] = (argument, convert(argument.values, keys()[row.key]))
        except WrongValueError as error:
            kind = Kind.lost if argument.is_known else Kind.unresolved
            draft.report(argument, kind, f"{row.key} must be {error}")
    checkpoint = draft.settings.get("model.hf_checkpoint")
    name = "" if checkpoint is None else str(checkpoint.value)
    has_images = "data.multimodal_keys" in draft.settings or "vl" in _letters(name)
    found = find_option(name, {path: setting.value for path, (_, setting) in given.items()}, has_images=has_images)
    values = {} if found is None else option_values("model", found)
    if found is not None:
        draft.options["model"] = found
    for path, (argument, setting) in given.items():
        if path in values and values[path] == setting.value:
            draft.report(argument, Kind.architecture, f"the option model={found} has it")
        elif path in values or not values:
            draft.set(argument, path, setting)
        else:
            draft.report(argument, Kind.architecture, "is read from config.json of model.hf_checkpoint")


def find_option(checkpoint: str, given: Mapping[str, Any], *, has_images: bool = False) -> str | None:
    """The option of `model` of a checkpoint, by its architecture; without one by its name.

    Args:
        checkpoint: name or folder of the model.
        given: keys of the architecture and their values.
        has_images: the model reads images: it may have the same decoder as one that reads text only.
    """
    best: tuple[bool, float, str] | None = None
    for name in ConfigFolders.find().groups()["model"]:
        values = option_values("model", name)
        if "model.build" in values or "model.hf_checkpoint" not in values:
            continue
        if has_images is (find_family(values.get("model.model_type")).vision is None):
            continue
        shared = [path for path in given if path in values]
        differs = [path for path in shared if given[path] != values[path] and path not in MAY_DIFFER]
        if differs:
            continue
        if len([path for path in SIZES if path in shared]) < 2 and not _is_named(checkpoint, values):
            continue
        # Of several options with the same sizes, the one whose name begins that of the checkpoint, or is most like it.
        own, known = _letters(checkpoint), _letters(str(values["model.hf_checkpoint"]))
        found = (not own.startswith(known), OSA.normalized_distance(own, known), name)
        best = found if best is None else min(best, found)
    return None if best is None else best[2]


@cache
def option_values(group: str, name: str) -> Mapping[str, Any]:
    """The values of an option by path."""
    return MappingProxyType(dict(flatten(read_yaml_files([(group, name)], ConfigFolders.find()).values())))


def _is_named(checkpoint: str, values: Mapping[str, Any]) -> bool:
    return bool(checkpoint) and _letters(checkpoint) == _letters(str(values["model.hf_checkpoint"]))


def _letters(checkpoint: str) -> str:
    """The name of a checkpoint without its folder and punctuation."""
    return re.sub(r"[^a-z0-9]", "", checkpoint.rstrip("/").rpartition("/")[2].lower())
