"""Finished groups in a checkpoint: generated ahead and not yet trained on.

    <checkpoint>/groups.json            one entry per group, without columns of tokens
    <checkpoint>/groups.safetensors     response_ids, loss_mask, rollout_logprobs, weight_versions: all samples one
                                        after the other, in the order of groups.json; offsets [S + 1]; routes, of the
                                        samples that have some, one whole sample after the other, and has_routes [S]

Both are absent if there are no such groups. Nothing in them is executed when they are read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlscale.errors import DataError
from rlscale.types import ConversationPart, Group, Prompt, RouteIds, Sample, SampleStatus

GROUPS_FILE, COLUMNS_FILE = "groups.json", "groups.safetensors"
_SAMPLE_FIELDS = ("index", "seed", "path", "response", "status", "reward", "metadata")

Array = npt.NDArray[Any]


def save_groups(folder: Path, groups: Sequence[Group]) -> None:
    """Writes groups into the folder of a checkpoint.

    Args:
        folder: must exist.
        groups: their metadata are JSON values; numbers and arrays of numpy are converted to Python's.
    """
    if not groups:
        return
    samples = [sample for group in groups for sample in group.samples]
    entries = [
        {
            "index": group.index,
            "prompt": asdict(group.prompt),
            "samples": [_sample_entry(sample, group) for sample in group.samples],
        }
        for group in groups
    ]
    (folder / GROUPS_FILE).write_text(json.dumps(entries, default=_to_python), encoding="utf-8")
    # Sample i has tokens offsets[i] to offsets[i + 1] of every column.
    columns = {
        "offsets": np.cumsum([0, *(sample.response_len for sample in samples)], dtype=np.int64),
        "response_ids": _concatenate([sample.response_ids for sample in samples], np.int32),
        "loss_mask": _concatenate([sample.loss_mask for sample in samples], np.uint8),
        "rollout_logprobs": _concatenate([sample.rollout_logprobs for sample in samples], np.float32),
        "weight_versions": _concatenate([sample.weight_versions for sample in samples], np.int32),
    }
    routed = [sample.routes for sample in samples if sample.routes is not None]
    if routed:
        columns["routes"] = np.concatenate(routed)
        columns["has_routes"] = np.asarray([sample.routes is not None for sample in samples])
    save_file(columns, folder / COLUMNS_FILE)


def load_groups(folder: Path) -> list[Group]:
    """Returns the groups that `save_groups` wrote, equal in every field; an empty list if it wrote none.

    Raises:
        DataError: the files cannot be read.
    """
    if not (folder / GROUPS_FILE).exists():
        return []
    try:
        entries = json.loads((folder / GROUPS_FILE).read_text(encoding="utf-8"))
        columns = load_file(folder / COLUMNS_FILE)
        routes, has_routes = columns.pop("routes", None), columns.pop("has_routes", None)
        starts = iter(columns["offsets"][:-1].tolist())
        stops = iter(columns["offsets"][1:].tolist())
        groups = [
            _build_group(entry, columns, [(next(starts), next(stops)) for _ in entry["samples"]]) for entry in entries
        ]
        if routes is not None and has_routes is not None:
            _assign_routes([sample for group in groups for sample in group.samples], routes, has_routes)
        return groups
    except (OSError, ValueError, KeyError, TypeError, StopIteration, SafetensorError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{folder / GROUPS_FILE} and {COLUMNS_FILE} must contain the checkpoint's finished groups, got {cause}; "
            f"delete {folder} to resume from the previous checkpoint"
        ) from error


def _sample_entry(sample: Sample, group: Group) -> dict[str, Any]:
    entry = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    # Only functions of the user give a sample another prompt.
    return entry if sample.prompt == group.prompt else entry | {"prompt": asdict(sample.prompt)}


def _build_prompt(values: Mapping[str, Any]) -> Prompt:
    # JSON has lists where a prompt has tuples.
    turns = tuple(ConversationPart(*turn) for turn in values.get("turns", ()))
    return Prompt(**{**values, "token_ids": tuple(values["token_ids"]), "turns": turns})


def _build_group(entry: Mapping[str, Any], columns: Mapping[str, Array], spans: Sequence[tuple[int, int]]) -> Group:
    prompt = _build_prompt(entry["prompt"])
    samples = []
    for sample_fields, (start, stop) in zip(entry["samples"], spans, strict=True):
        own = _build_prompt(sample_fields["prompt"]) if "prompt" in sample_fields else prompt
        sample = Sample(
            **{**sample_fields, "status": SampleStatus(sample_fields["status"]), "prompt": own},
            group_index=entry["index"],
        )
        # Copies: views would keep the columns of all samples alive.
        values = {name: column[start:stop].copy() for name, column in columns.items() if name != "offsets"}
        sample.tokens = np.concatenate([sample.tokens, values["response_ids"]])
        sample.loss_mask = values["loss_mask"]
        sample.rollout_logprobs = values["rollout_logprobs"]
        sample.weight_versions = values["weight_versions"]
        samples.append(sample)
    return Group(index=entry["index"], prompt=prompt, samples=samples)


def _assign_routes(samples: Sequence[Sample], routes: RouteIds, has_routes: Array) -> None:
    start = 0
    for sample, has_some in zip(samples, has_routes.tolist(), strict=True):
        if has_some:
            # A copy: a view would keep the memory of all samples alive.
            sample.routes = routes[start : start + len(sample.tokens)].copy()
            start += len(sample.tokens)
    if start != len(routes):
        raise ValueError(f"routes must be of {start} tokens, got {len(routes)}")


def _to_python(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata of a sample must be JSON values to be kept in a checkpoint, got {type(value).__name__}")


def _concatenate(lists: Sequence[Sequence[float] | Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(values, dtype=dtype) for values in lists)])
