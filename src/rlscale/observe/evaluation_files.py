"""Samples and metrics of evaluations in the run folder.

<run>/evaluations/v00000012/evaluation.json   the version, metrics, and settings of every set
<run>/evaluations/v00000012/0_gsm8k.jsonl     one line per prompt with its samples, in the order in which they finished
<run>/evaluations/v00000012.regrade/         the same samples with other rewards, of `rlscale-eval --regrade`

A folder has its final name once it is complete.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np

from rlscale.errors import DataError
from rlscale.types import (
    REWARDS,
    Failure,
    FailureCause,
    Group,
    Int32,
    Prompt,
    Sample,
    SampleStatus,
    UInt8,
    WeightVersion,
)

log = logging.getLogger(__name__)

FOLDER, ABOUT_FILE, REGRADE = "evaluations", "evaluation.json", ".regrade"
_COMPLETE = re.compile(r"v\d{8,}(\.regrade)?")
_SAVING = ".saving"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The weights that an evaluation measures."""

    version: WeightVersion
    num_rollouts: int  # that trained them
    weights: str | None = None  # folder or hub id; None: those of the run

    @classmethod
    def of_run(cls, version: WeightVersion, num_rollouts: int) -> Measured:
        return cls(version=version, num_rollouts=num_rollouts)


class EvaluationFiles:
    """The evaluations of a run.

    Args:
        folder: run folder.
        keep_last: number of evaluations whose files are kept, the newest ones; None: all, 0: none is written.
        resume_at: number of finished rollouts of the run; evaluations after more of them are deleted, as they are
            repeated.
    """

    def __init__(self, folder: Path, *, keep_last: int | None, resume_at: int) -> None:
        self._folder, self._keep_last = folder / FOLDER, keep_last
        self.rewind(resume_at)

    def open(self, measured: Measured, sets: Mapping[str, Mapping[str, Any]]) -> EvaluationWriter | None:
        """The files of one evaluation; None: they are not kept.

        Args:
            sets: settings of every set by name, for the record.
        """
        if self._keep_last == 0:
            return None
        return EvaluationWriter(self._folder / f"v{measured.version:08d}", measured, sets, prune=self._prune)

    def rewind(self, num_rollouts: int) -> None:
        """Deletes evaluations that are incomplete, or of weights after more rollouts."""
        for path in list(self._folder.iterdir()) if self._folder.is_dir() else ():
            if path.name.endswith(_SAVING):
                shutil.rmtree(path)
        for path in find_evaluations(self._folder.parent):
            try:
                is_kept = read_about(path)["num_rollouts"] <= num_rollouts
            except DataError as error:
                # The machine failed before it was on disk. Nothing can read it, and the run must resume.
                log.warning("%s is deleted: %s", path, error)
                is_kept = False
            if not is_kept:
                shutil.rmtree(path)

    def _prune(self) -> None:
        if self._keep_last is None:
            return
        versions = sorted({path.name.removesuffix(REGRADE) for path in find_evaluations(self._folder.parent)})
        for name in versions[: -self._keep_last]:
            for path in (self._folder / name, self._folder / f"{name}{REGRADE}"):
                shutil.rmtree(path, ignore_errors=True)


class EvaluationWriter:
    """Writes one evaluation. `add` may be called from several threads."""

    def __init__(
        self,
        final: Path,
        measured: Measured,
        sets: Mapping[str, Mapping[str, Any]],
        *,
        prune: Callable[[], None] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._final, self._temporary = final, final.with_name(final.name + _SAVING)
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._prune, self._lock = prune, Lock()
        self._files: dict[str, IO[str]] = {}
        self._about: dict[str, Any] = {**asdict(measured), **(about or {}), "sets": {}}
        for number, (name, settings) in enumerate(sets.items()):
            file = f"{number}_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.jsonl"
            self._about["sets"][name] = {"file": file, **settings}
            # Half a surrogate pair, which UTF-8 lacks, becomes its escape, which JSON has.
            self._files[name] = (self._temporary / file).open("w", encoding="utf-8", errors="backslashreplace")

    def add(self, name: str, group: Group) -> None:
        """Appends a finished group of a set."""
        # User code may put any object into the metadata of a sample.
        line = json.dumps(group_record(group), ensure_ascii=False, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            # A thread may still be here when the evaluation has been cancelled.
            if not self._files[name].closed:
                self._files[name].write(line)

    def commit(self, metrics: Mapping[str, float]) -> Path:
        """Completes the evaluation, which replaces one of the same version; returns its folder."""
        with self._lock:
            self._close()
            self._about["time"] = datetime.now(UTC).isoformat(timespec="seconds")
            self._about["metrics"] = dict(metrics)
            (self._temporary / ABOUT_FILE).write_text(json.dumps(self._about, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(self._final, ignore_errors=True)
            self._temporary.rename(self._final)
        if self._prune is not None:
            self._prune()
        return self._final

    def discard(self) -> None:
        """Deletes what was written of an evaluation that did not finish."""
        # A thread may be in `commit` when the evaluation is cancelled: what it completes stays complete.
        with self._lock:
            self._close()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()


def find_evaluations(folder: Path) -> list[Path]:
    """The folders of complete evaluations of a run, by version, each before its `.regrade`."""
    inside = folder / FOLDER
    found = [path for path in inside.iterdir() if _COMPLETE.fullmatch(path.name)] if inside.is_dir() else []
    return sorted(found, key=lambda path: (int(path.name[1:].partition(".")[0]), path.name))


def read_about(folder: Path) -> dict[str, Any]:
    """`evaluation.json` of an evaluation. Raises DataError if it cannot be read."""
    path = folder / ABOUT_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise DataError(f"{path} must describe an evaluation, got {cause}; evaluate again") from error
    if not isinstance(about, dict) or not {"version", "num_rollouts", "sets", "metrics"} <= about.keys():
        raise DataError(f"{path} must describe an evaluation, got {str(about)[:60]}; evaluate again")
    return about


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a set, one at a time. Raises DataError that names the row that cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            for row, line in enumerate(file, start=1):
                yield _parse(path, row, line)
    except (OSError, UnicodeDecodeError) as error:
        cause = " ".join(str(error).split())
        raise DataError(f"{path} must hold the samples of an evaluation, got {cause}; evaluate again") from error


def _parse(path: Path, row: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or not {"prompt", "prompt_ids", "samples", "failed"} <= record.keys():
            raise ValueError("no samples")
    except ValueError as error:
        raise DataError(f"{path}, row {row} must be the samples of a prompt, got {line[:80]!r}; remove it") from error
    return record


def group_record(group: Group) -> dict[str, Any]:
    """A group as JSON values; see `read_group`."""
    prompt = group.prompt
    return {
        "row": prompt.index,
        "group": group.index,
        "prompt": prompt.text,
        "prompt_ids": list(prompt.token_ids),
        "label": prompt.label,
        "metadata": prompt.metadata,
        "samples": [_sample_record(sample, prompt) for sample in group.samples],
        "failed": [_sample_record(sample, prompt) for sample in group.failed],
    }


def _sample_record(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": sample.index,
        "path": sample.path,
        "seed": sample.seed,
        "status": str(sample.status),
        "reward": sample.reward,
        "response": sample.response,
        "response_ids": sample.response_ids,
        "loss_mask": _runs(sample.loss_mask),
        "weight_versions": _runs(sample.weight_versions),
        "metadata": sample.metadata,
    }
    if sample.failure is not None:
        record["failure"] = {"cause": str(sample.failure.cause), "message": sample.failure.message}
        if sample.failure.ended_as is not None:
            record["failure"]["ended_as"] = str(sample.failure.ended_as)
    if sample.prompt is not prompt and sample.prompt != prompt:
        # Of a generate function that made another prompt.
        record["prompt"], record["prompt_ids"] = sample.prompt.text, list(sample.prompt.token_ids)
    return record


def read_group(record: Mapping[str, Any], *, version: WeightVersion) -> Group:
    """The group of a line, without rewards: `group_record` in reverse.

    Args:
        version: of tokens in files without their versions.

    Samples whose grader failed are among the others, as they can be graded; logprobs were not kept and are 0.
    """
    prompt = Prompt(
        index=record["row"],
        text=record["prompt"],
        token_ids=tuple(record["prompt_ids"]),
        label=record["label"],
        metadata=dict(record["metadata"]),
    )
    samples: list[Sample] = []
    failed: list[Sample] = []
    for each in (*record["samples"], *record["failed"]):
        sample = _read_sample(each, prompt, group_index=record["group"], version=version)
        (failed if sample.status == SampleStatus.failed else samples).append(sample)
    samples.sort(key=lambda sample: (sample.index, sample.path))
    return Group(index=record["group"], prompt=prompt, samples=samples, failed=failed)


def _read_sample(record: Mapping[str, Any], prompt: Prompt, *, group_index: int, version: WeightVersion) -> Sample:
    if "prompt_ids" in record:
        prompt = Prompt(
            index=prompt.index,
            text=record["prompt"],
            token_ids=tuple(record["prompt_ids"]),
            label=prompt.label,
            metadata=prompt.metadata,
        )
    sample = Sample(
        index=record["index"], group_index=group_index, prompt=prompt, seed=record["seed"], path=record["path"]
    )
    ids: Sequence[int] = record["response_ids"]
    versions = _expand(record.get("weight_versions", [[version, len(ids)]]))
    sample.append(ids, logprobs=np.zeros(len(ids), np.float32), weight_versions=versions)
    sample.loss_mask = _expand(record["loss_mask"]).astype(np.uint8)
    sample.response, sample.status = record["response"], SampleStatus(record["status"])
    sample.metadata = {name: value for name, value in record["metadata"].items() if name != REWARDS}
    failure = record.get("failure")
    if failure is not None:
        cause = FailureCause(failure["cause"])
        if cause == FailureCause.grader:
            sample.status = SampleStatus(failure.get("ended_as", SampleStatus.completed))
        else:
            sample.failure = Failure(cause=cause, message=failure["message"])
    return sample


def _runs(values: UInt8 | Int32) -> list[list[int]]:
    """Run-length encoding of a column that is nearly constant."""
    return [[value, len(list(same))] for value, same in groupby(values.tolist())]


def _expand(runs: Sequence[Sequence[int]]) -> Int32:
    """The column of `_runs`."""
    values, numbers = [value for value, _ in runs], [number for _, number in runs]
    return np.repeat(np.asarray(values, np.int32), np.asarray(numbers, np.int64))
