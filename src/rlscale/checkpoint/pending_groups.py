"""Finished groups in a checkpoint: those that were generated ahead and not yet trained on.

    <checkpoint>/groups.json            one entry a group, without what is counted by token
    <checkpoint>/groups.safetensors     response_ids, loss_mask, rollout_logprobs, weight_versions: all samples end to
                                        end, in the order of groups.json; offsets [S + 1]; with routes those of
                                        the samples that have some, whole samples end to end, and has_routes [S]

Absent where there are none. Nothing in them is executed when they are read.
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
from rlscale.types import Group, Prompt, RouteIds, Sample, SampleStatus, Turn

ABOUT_FILE, COLUMNS_FILE = "groups.json", "groups.safetensors"
_SAMPLE_FIELDS = ("index", "seed", "response", "status", "reward", "metadata")

Array = npt.NDArray[Any]


def save_groups(folder: Path, groups: Sequence[Group]) -> None:
    """Writes groups into the folder of a checkpoint.

    Args:
        folder: exists.
        groups: their metadata are JSON values; numbers and arrays of numpy become those of Python.
    """
    if not groups:
        return
    samples = [sample for group in groups for sample in group.samples]
    about = [
        {
            "index": group.index,
            "prompt": asdict(group.prompt),
            "samples": [{name: getattr(sample, name) for name in _SAMPLE_FIELDS} for sample in group.samples],
        }
        for group in groups
    ]
    (folder / ABOUT_FILE).write_text(json.dumps(about, default=_plain), encoding="utf-8")
    columns = {
        "offsets": np.cumsum([0, *(sample.response_len for sample in samples)], dtype=np.int64),
        "response_ids": _flat([sample.response_ids for sample in samples], np.int32),
        "loss_mask": _flat([sample.loss_mask for sample in samples], np.uint8),
        # float64: exactly the numbers that the engine gave.
        "rollout_logprobs": _flat([sample.rollout_logprobs for sample in samples], np.float64),
        "weight_versions": _flat([sample.weight_versions for sample in samples], np.int32),
    }
    routed = [sample.routes for sample in samples if sample.routes is not None]
    if routed:
        columns["routes"] = np.concatenate(routed)
        columns["has_routes"] = np.asarray([sample.routes is not None for sample in samples])
    save_file(columns, folder / COLUMNS_FILE)


def load_groups(folder: Path) -> list[Group]:
    """The groups that `save_groups` wrote, equal in everything; none where it wrote none.

    Raises:
        DataError: the files cannot be read.
    """
    if not (folder / ABOUT_FILE).exists():
        return []
    try:
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        columns = load_file(folder / COLUMNS_FILE)
        routes, has_routes = columns.pop("routes", None), columns.pop("has_routes", None)
        starts = iter(columns["offsets"][:-1].tolist())
        stops = iter(columns["offsets"][1:].tolist())
        groups = [_group(entry, columns, [(next(starts), next(stops)) for _ in entry["samples"]]) for entry in about]
        if routes is not None and has_routes is not None:
            _give_routes([sample for group in groups for sample in group.samples], routes, has_routes)
        return groups
    except (OSError, ValueError, KeyError, TypeError, StopIteration, SafetensorError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{folder / ABOUT_FILE} and {COLUMNS_FILE} must hold the finished groups of the checkpoint, got {cause}; "
            f"delete {folder} to go on from the one before"
        ) from error


def _group(entry: Mapping[str, Any], columns: Mapping[str, Array], spans: Sequence[tuple[int, int]]) -> Group:
    given = entry["prompt"]
    turns = tuple(Turn(*turn) for turn in given.get("turns", ()))
    prompt = Prompt(**{**given, "token_ids": tuple(given["token_ids"]), "turns": turns})
    samples = []
    for fields, (start, stop) in zip(entry["samples"], spans, strict=True):
        sample = Sample(
            **{**fields, "status": SampleStatus(fields["status"])}, group_index=entry["index"], prompt=prompt
        )
        of_sample = {name: column[start:stop].tolist() for name, column in columns.items() if name != "offsets"}
        sample.tokens += of_sample["response_ids"]
        sample.loss_mask = of_sample["loss_mask"]
        sample.rollout_logprobs = of_sample["rollout_logprobs"]
        sample.weight_versions = of_sample["weight_versions"]
        samples.append(sample)
    return Group(index=entry["index"], prompt=prompt, samples=samples)


def _give_routes(samples: Sequence[Sample], routes: RouteIds, has_routes: Array) -> None:
    start = 0
    for sample, has_some in zip(samples, has_routes.tolist(), strict=True):
        if has_some:
            # A copy: else each sample would hold the memory of all of them.
            sample.routes = routes[start : start + len(sample.tokens)].copy()
            start += len(sample.tokens)
    if start != len(routes):
        raise ValueError(f"routes must be those of {start} tokens, got {len(routes)}")


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata of a sample must be JSON values to be kept in a checkpoint, got {type(value).__name__}")


def _flat(lists: Sequence[Sequence[float]], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists])
