"""Finished groups in a checkpoint: those that were generated ahead and not yet trained on.

    <checkpoint>/groups.json            one entry a group, without what is counted by token
    <checkpoint>/groups.safetensors     response_ids, loss_mask, rollout_logprobs, weight_versions: all samples end to
                                        end, in the order of groups.json; offsets [S + 1]

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
from rlscale.types import Group, Prompt, Sample, SampleStatus, Turn

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
        starts = iter(columns["offsets"][:-1].tolist())
        stops = iter(columns["offsets"][1:].tolist())
        return [_group(entry, columns, [(next(starts), next(stops)) for _ in entry["samples"]]) for entry in about]
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


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata of a sample must be JSON values to be kept in a checkpoint, got {type(value).__name__}")


def _flat(lists: Sequence[Sequence[float]], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists])
