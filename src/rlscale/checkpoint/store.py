"""Checkpoints of a run in one folder: each complete or absent, the newest ones kept.

    <folder>/rollout_00000012/          the folder from `begin`, renamed once everything in it is on disk
        checkpoint.json                 rollout_id, format and the state of the controller
        ...                             written by the trainer ranks
    <folder>/rollout_00000013.saving/   a save in progress, or the rest of a killed one

A folder is a checkpoint if and only if it has its final name: `commit` flushes every file and then renames the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlscale.errors import ConfigError, DataError, Problem
from rlscale.models.whole_files import find_incomplete

FORMAT = 1
STATE_FILE = "checkpoint.json"
_COMPLETE = re.compile(r"rollout_\d{8,}")
_LEFTOVER = re.compile(r"rollout_\d{8,}(\.replaced)?\.(saving|deleting)")
_SAVING, _DELETING, _REPLACED = ".saving", ".deleting", ".replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: the `rollout_id` with which it was saved and the `state` of the controller."""

    folder: Path
    rollout_id: int
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run. One process at a time may open a folder; opening it deletes unfinished saves.

    Args:
        flush_with: files that a checkpoint relies on, such as the metrics up to it; flushed before it is complete.

    Example:
        store = CheckpointStore(run_dir / "checkpoints", keep_last=2)
        backend.save(store.begin(12))
        store.commit(12, {"progress": progress})
        store.latest().state["progress"]
    """

    def __init__(self, folder: Path, keep_last: int, *, flush_with: Sequence[Path] = ()) -> None:
        assert keep_last > 0, "checkpoint.keep_last is at least 1"
        self._folder, self._keep_last, self._flush_with = folder, keep_last, tuple(flush_with)
        for path in list(folder.iterdir()) if folder.is_dir() else ():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        for path in folder.glob(f"rollout_*{_REPLACED}"):
            _finish_replacement(path)

    def begin(self, rollout_id: int) -> Path:
        """Creates an empty folder for the files of a checkpoint. It is not a checkpoint before `commit`."""
        temporary = self._temporary(rollout_id)
        if temporary.exists():
            # An earlier save of this rollout failed, and the process continued.
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, rollout_id: int, state: Mapping[str, Any]) -> Checkpoint:
        """Completes a checkpoint: flushes it to disk, renames it, and only then deletes older ones.

        Args:
            rollout_id: the argument of `begin`. A checkpoint of the same rollout is replaced.
            state: JSON values.
        """
        temporary, final = self._temporary(rollout_id), self._final(rollout_id)
        assert temporary.is_dir(), "begin comes before commit"
        content = {"format": FORMAT, "rollout_id": rollout_id, "state": dict(state)}
        (temporary / STATE_FILE).write_text(json.dumps(content, allow_nan=True), encoding="utf-8")
        _flush_tree(temporary)
        for path in self._flush_with:
            if path.exists():
                _flush(path)
        if final.exists():
            # A folder cannot replace a non-empty one, so for a moment neither exists; see `_finish_replacement`.
            replaced = final.rename(_sibling(final, _REPLACED))
            temporary.rename(final)
            _finish_replacement(replaced)
        else:
            temporary.rename(final)
        # The rename itself is on disk only with the parent folder.
        _flush(self._folder)
        self._prune()
        return Checkpoint(folder=final, rollout_id=rollout_id, state=dict(state))

    def latest(self) -> Checkpoint | None:
        """Returns the newest checkpoint, or None. Raises DataError if it cannot be read."""
        complete = _complete(self._folder)
        return _read(complete[-1]) if complete else None

    @staticmethod
    def has_checkpoint(folder: Path) -> bool:
        """Whether `resolve` finds a checkpoint in or below a folder."""
        return (folder / STATE_FILE).is_file() or bool(_complete(folder) or _complete(folder / "checkpoints"))

    @staticmethod
    def continues(folder: Path, start: Path) -> bool:
        """Whether a run that starts from the checkpoints at `start` starts from the newest one of a folder."""
        own, given = folder.resolve(), start.resolve()
        complete = _complete(own)
        return given in (own, complete[-1] if complete else own / "checkpoints")

    @staticmethod
    def is_leftover(folder: Path) -> bool:
        """Whether a folder is of a save that was never completed."""
        return _LEFTOVER.fullmatch(folder.name) is not None

    @staticmethod
    def resolve(path: str | Path, *, key: str = "checkpoint.load", rollout_id: int | None = None) -> Checkpoint:
        """Reads the checkpoint at `path`: the folder of one, or of several or of a run, whose newest is read.

        Args:
            key: the config key of the path, for errors.
            rollout_id: read this checkpoint instead of the newest.

        Raises:
            ConfigError: there is no such checkpoint.
            DataError: the checkpoint cannot be read.
        """
        folder = Path(os.path.expanduser(path))
        complete = (
            [folder] if (folder / STATE_FILE).is_file() else _complete(folder) or _complete(folder / "checkpoints")
        )
        if complete and rollout_id is None:
            return _read(complete[-1])
        for each in complete:
            if each.name == _name(rollout_id or 0):
                return _read(each)
        if complete:
            found = ", ".join(each.name for each in complete)
            rule, fix = f"name a folder with the checkpoint of rollout {rollout_id}", f"the folder has {found}"
            raise ConfigError([Problem(path=key, rule=rule, value=repr(str(path)), fix=fix)])
        fix = "name the folder of a checkpoint, of a run, or one that contains checkpoints"
        if _LEFTOVER.fullmatch(folder.name):
            fix = "that save was never completed; " + fix
        raise ConfigError([Problem(path=key, rule="name a complete checkpoint", value=repr(str(path)), fix=fix)])

    def _prune(self) -> None:
        for old in _complete(self._folder)[: -self._keep_last]:
            _delete(old)

    def _temporary(self, rollout_id: int) -> Path:
        return _sibling(self._final(rollout_id), _SAVING)

    def _final(self, rollout_id: int) -> Path:
        return self._folder / _name(rollout_id)


def _name(rollout_id: int) -> str:
    return f"rollout_{rollout_id:08d}"


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def _delete(folder: Path) -> None:
    """Deletes a checkpoint."""
    # Renamed first: an interrupted deletion must not leave an incomplete checkpoint under a final name.
    shutil.rmtree(folder.rename(_sibling(folder, _DELETING)))


def _finish_replacement(replaced: Path) -> None:
    """Deletes a replaced checkpoint, or restores its name if the replacement was interrupted."""
    final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
    if final.exists():
        _delete(replaced)
    else:
        replaced.rename(final)


def _complete(folder: Path) -> list[Path]:
    """Lists checkpoint folders, oldest first."""
    found = [path for path in folder.glob("rollout_*") if _COMPLETE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("rollout_")))


def _read(folder: Path) -> Checkpoint:
    file = folder / STATE_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        checkpoint = Checkpoint(folder=folder, rollout_id=int(content["rollout_id"]), state=content["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{file} must be the state of a checkpoint, got {cause}; "
            f"delete {folder} to resume from the previous checkpoint"
        ) from error
    if content.get("format") != FORMAT:
        raise DataError(
            f"{file} must be of format {FORMAT}, got {content.get('format')!r}; load it with the version that wrote it"
        )
    for tensors in sorted({each.parent for each in folder.rglob("*.safetensors")}):
        if incomplete := find_incomplete(tensors):
            raise DataError(
                f"{tensors} must hold complete files, got one that is not: {incomplete}; "
                f"delete {folder} to resume from the previous checkpoint"
            )
    return checkpoint


def _flush_tree(folder: Path) -> None:
    """Flushes every file and folder below `folder` to disk, so that a later rename is not on disk before them."""
    # A folder is flushed too: its entries are part of it, not of the files.
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
