"""Groups in a checkpoint: generated ahead and not yet trained on, and dropped ones that a hook has not seen.

    <checkpoint>/groups.json            one entry per group, without columns of tokens
    <checkpoint>/groups.safetensors     response_ids, loss_mask, rollout_logprobs, weight_versions: all samples one
                                        after the other, in the order of groups.json, those of a group before its failed
                                        ones; offsets [S + 1]; routes, of the samples that have some, one whole sample
                                        after the other, and has_routes [S]; teacher_logprobs, teacher_top_ids and
                                        teacher_top_logprobs of responses, in the same way, and has_teacher [S]
    <checkpoint>/dropped_00000012.*     the same for the groups that a filter dropped from the unfinished rollout 12

Files without groups are absent. Nothing in them is executed when they are read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlscale.errors import DataError
from rlscale.expert_routes import RouteIds
from rlscale.images import Image, build_images
from rlscale.teacher_scores import TeacherScores
from rlscale.types import ConversationPart, Failure, FailureCause, Group, Prompt, Sample, SampleStatus, SampleTurn

PENDING = "groups"
GROUPS_FILE, COLUMNS_FILE = f"{PENDING}.json", f"{PENDING}.safetensors"
_DROPPED, _TEACHER = "dropped_", "teacher_"
_SAMPLE_FIELDS = ("index", "seed", "path", "response", "status", "reward", "metadata")

Array = npt.NDArray[Any]


def save_groups(folder: Path, groups: Sequence[Group], *, name: str = PENDING) -> None:
    """Writes groups into the folder of a checkpoint.

    Args:
        folder: must exist.
        groups: their metadata are JSON values; numbers and arrays of numpy are converted to Python's.
        name: of the two files.
    """
    if not groups:
        return
    samples = [sample for group in groups for sample in (*group.samples, *group.failed)]
    entries = [_group_entry(group) for group in groups]
    (folder / f"{name}.json").write_text(json.dumps(entries, default=_to_python), encoding="utf-8")
    # Sample i has tokens offsets[i] to offsets[i + 1] of every column.
    columns = {
        "offsets": np.cumsum([0, *(sample.response_len for sample in samples)], dtype=np.int64),
        "response_ids": _concatenate([sample.response_tokens for sample in samples], np.int32),
        "loss_mask": _concatenate([sample.loss_mask for sample in samples], np.uint8),
        "rollout_logprobs": _concatenate([sample.rollout_logprobs for sample in samples], np.float32),
        "weight_versions": _concatenate([sample.weight_versions for sample in samples], np.int32),
    }
    routed = [sample.routes for sample in samples if sample.routes is not None]
    if routed:
        columns["routes"] = np.concatenate(routed)
        columns["has_routes"] = np.asarray([sample.routes is not None for sample in samples])
    scored = [sample.teacher for sample in samples if sample.teacher is not None]
    if scored:
        for column in scored[0].columns():
            columns[f"{_TEACHER}{column}"] = np.concatenate([each.columns()[column] for each in scored])
        columns["has_teacher"] = np.asarray([sample.teacher is not None for sample in samples])
    save_file(columns, folder / f"{name}.safetensors")


def save_dropped(folder: Path, dropped: Mapping[int, Sequence[Group]]) -> None:
    """Writes the groups that a filter dropped from unfinished rollouts, by rollout."""
    for rollout_id, groups in dropped.items():
        save_groups(folder, groups, name=f"{_DROPPED}{rollout_id:08d}")


def load_dropped(folder: Path) -> dict[int, list[Group]]:
    """Returns the groups that `save_dropped` wrote. Raises DataError if they cannot be read."""
    names = sorted(path.stem for path in folder.glob(f"{_DROPPED}*.json"))
    return {int(name.removeprefix(_DROPPED)): load_groups(folder, name=name) for name in names}


def load_groups(folder: Path, *, name: str = PENDING) -> list[Group]:
    """Returns the groups that `save_groups` wrote, equal in every field; an empty list if it wrote none.

    Raises:
        DataError: the files cannot be read.
    """
    file, columns_file = folder / f"{name}.json", f"{name}.safetensors"
    if not file.exists():
        return []
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        columns = load_file(folder / columns_file)
        routes, has_routes = columns.pop("routes", None), columns.pop("has_routes", None)
        teacher = {each: columns.pop(each) for each in list(columns) if each.startswith(_TEACHER)}
        has_teacher = columns.pop("has_teacher", None)
        starts = iter(columns["offsets"][:-1].tolist())
        stops = iter(columns["offsets"][1:].tolist())
        groups = [
            _build_group(entry, columns, [(next(starts), next(stops)) for _ in (*entry["samples"], *entry["failed"])])
            for entry in entries
        ]
        if routes is not None and has_routes is not None:
            samples = [sample for group in groups for sample in (*group.samples, *group.failed)]
            _assign_routes(samples, routes, has_routes)
        if has_teacher is not None:
            _assign_teacher(
                [sample for group in groups for sample in (*group.samples, *group.failed)], teacher, has_teacher
            )
        return groups
    except (OSError, ValueError, KeyError, TypeError, StopIteration, SafetensorError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{file} and {columns_file} must contain the checkpoint's finished groups, got {cause}; "
            f"delete {folder} to resume from the previous checkpoint"
        ) from error


class _ImageTable:
    """Images of a group, each stored once; prompts and samples have their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Image, int] = {}

    def numbers(self, images: Sequence[Image]) -> list[int]:
        return [self._numbers.setdefault(image, len(self._numbers)) for image in images]

    def entry(self) -> list[dict[str, Any]]:
        return [asdict(image) for image in self._numbers]


def _group_entry(group: Group) -> dict[str, Any]:
    images = _ImageTable()
    return {
        "index": group.index,
        "prompt": _prompt_entry(group.prompt, images),
        "samples": [_sample_entry(sample, group, images) for sample in group.samples],
        "failed": [_sample_entry(sample, group, images) for sample in group.failed],
        "images": images.entry(),  # last: the others fill the table
    }


def _prompt_entry(prompt: Prompt, images: _ImageTable) -> dict[str, Any]:
    return {**asdict(replace(prompt, images=())), "images": images.numbers(prompt.images)}


def _sample_entry(sample: Sample, group: Group, images: _ImageTable) -> dict[str, Any]:
    entry = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    if sample.failure is not None:
        entry["failure"] = asdict(sample.failure)
    if sample.status == SampleStatus.aborted and any(turn.messages for turn in sample.turns):
        # What continues the conversation of an agent; without times, which differ when a run is repeated.
        entry["turns"] = [turn._replace(interval_s=None)._asdict() for turn in sample.turns]
    if sample.images != sample.prompt.images:
        entry["images"] = images.numbers(sample.images)
    # Only agents and functions of the user give a sample another prompt.
    return entry if sample.prompt == group.prompt else entry | {"prompt": _prompt_entry(sample.prompt, images)}


def _build_prompt(values: Mapping[str, Any], table: Sequence[Image]) -> Prompt:
    # JSON has lists where a prompt has tuples.
    turns = tuple(ConversationPart(*turn) for turn in values.get("turns", ()))
    messages, images = tuple(values.get("messages", ())), tuple(table[number] for number in values.get("images", ()))
    tuples = {"token_ids": tuple(values["token_ids"]), "turns": turns, "messages": messages, "images": images}
    return Prompt(**{**values, **tuples})


def _build_group(entry: Mapping[str, Any], columns: Mapping[str, Array], spans: Sequence[tuple[int, int]]) -> Group:
    table = build_images(entry["images"])
    prompt = _build_prompt(entry["prompt"], table)
    samples = []
    for sample_fields, (start, stop) in zip((*entry["samples"], *entry["failed"]), spans, strict=True):
        own = _build_prompt(sample_fields["prompt"], table) if "prompt" in sample_fields else prompt
        failure = sample_fields.get("failure")
        if failure is not None:
            failure = Failure(cause=FailureCause(failure["cause"]), message=failure["message"])
        images = {}
        if "images" in sample_fields:
            images["images"] = tuple(table[number] for number in sample_fields["images"])
        turns = tuple(
            SampleTurn(**{**turn, "messages": tuple(turn["messages"])}) for turn in sample_fields.get("turns", ())
        )
        sample = Sample(
            **{
                **sample_fields,
                "status": SampleStatus(sample_fields["status"]),
                "prompt": own,
                "failure": failure,
                "turns": turns,
                **images,
            },
            group_index=entry["index"],
        )
        # Copies: views would keep the columns of all samples alive.
        values = {name: column[start:stop].copy() for name, column in columns.items() if name != "offsets"}
        sample.response_tokens = values["response_ids"]
        sample.loss_mask = values["loss_mask"]
        sample.rollout_logprobs = values["rollout_logprobs"]
        sample.weight_versions = values["weight_versions"]
        samples.append(sample)
    num_graded = len(entry["samples"])
    return Group(index=entry["index"], prompt=prompt, samples=samples[:num_graded], failed=samples[num_graded:])


def _assign_routes(samples: Sequence[Sample], routes: RouteIds, has_routes: Array) -> None:
    start = 0
    for sample, has_some in zip(samples, has_routes.tolist(), strict=True):
        if has_some:
            # A copy: a view would keep the memory of all samples alive.
            sample.routes = routes[start : start + sample.num_tokens].copy()
            start += sample.num_tokens
    if start != len(routes):
        raise ValueError(f"routes must be of {start} tokens, got {len(routes)}")


def _assign_teacher(samples: Sequence[Sample], columns: Mapping[str, Array], has_teacher: Array) -> None:
    start = 0
    for sample, has_some in zip(samples, has_teacher.tolist(), strict=True):
        if has_some:
            stop = start + sample.response_len
            # Copies, as of the routes.
            own = {name.removeprefix(_TEACHER): column[start:stop].copy() for name, column in columns.items()}
            sample.teacher, start = TeacherScores(**own), stop


def _to_python(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata of a sample must be JSON values to be kept in a checkpoint, got {type(value).__name__}")


def _concatenate(lists: Sequence[Sequence[float] | Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(values, dtype=dtype) for values in lists)])
