"""Checkpoints of a run in one folder: each complete or absent, the newest ones kept.

    <folder>/rollout_00000012/          what `begin` gave out, renamed once everything in it is on disk
        checkpoint.json                 rollout_id, format and the state of the controller
        ...                             written by the trainer ranks
    <folder>/rollout_00000013.saving/   a save in progress, or what a killed one left

A folder is a checkpoint if and only if it has its final name: `commit` flushes every file and then renames.
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

FORMAT = 1
STATE_FILE = "checkpoint.json"
_COMPLETE = re.compile(r"rollout_\d{8,}")
_LEFTOVER = re.compile(r"rollout_\d{8,}(\.replaced)?\.(saving|deleting)")
_SAVING, _DELETING, _REPLACED = ".saving", ".deleting", ".replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `rollout_id` is the number given when it was saved, `state` the controller's part."""

    folder: Path
    rollout_id: int
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run. One process at a time may own a folder; opening it clears away unfinished saves.

    Args:
        beside: files that a checkpoint counts on, as metrics of what was done before it; on disk before it is one.

    Example:
        store = CheckpointStore(run_dir / "checkpoints", keep_last=2)
        backend.save(store.begin(12))
        store.commit(12, {"progress": progress})
        store.latest().state["progress"]
    """

    def __init__(self, folder: Path, keep_last: int, *, beside: Sequence[Path] = ()) -> None:
        assert keep_last > 0, "checkpoint.keep_last is at least 1"
        self._folder, self._keep_last, self._beside = folder, keep_last, tuple(beside)
        for path in list(folder.iterdir()) if folder.is_dir() else ():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        for path in folder.glob(f"rollout_*{_REPLACED}"):
            _settle_replaced(path)

    def begin(self, rollout_id: int) -> Path:
        """An empty folder to write a checkpoint into. It counts for nothing until `commit`."""
        temporary = self._temporary(rollout_id)
        if temporary.exists():  # a save of this very rollout failed without ending the process
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, rollout_id: int, state: Mapping[str, Any]) -> Checkpoint:
        """Completes a checkpoint: flushes it to disk, gives it its name, and only then deletes older ones.

        Args:
            rollout_id: as given to `begin`. A checkpoint of the same number is replaced.
            state: JSON values.
        """
        temporary, final = self._temporary(rollout_id), self._final(rollout_id)
        assert temporary.is_dir(), "begin comes before commit"
        about = {"format": FORMAT, "rollout_id": rollout_id, "state": dict(state)}
        (temporary / STATE_FILE).write_text(json.dumps(about, allow_nan=True), encoding="utf-8")
        _flush_tree(temporary)
        for path in self._beside:
            if path.exists():
                _flush(path)
        if final.exists():
            # A folder cannot be renamed over a full one, so there is a moment without either; see `_settle_replaced`.
            replaced = final.rename(_beside(final, _REPLACED))
            temporary.rename(final)
            _settle_replaced(replaced)
        else:
            temporary.rename(final)
        _flush(self._folder)
        self._prune()
        return Checkpoint(folder=final, rollout_id=rollout_id, state=dict(state))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint; None if there is none yet. Raises DataError if it cannot be read."""
        complete = _complete(self._folder)
        return _read(complete[-1]) if complete else None

    @staticmethod
    def is_one(folder: Path) -> bool:
        """Whether `resolve` takes it for a checkpoint or for a folder that holds some."""
        return (folder / STATE_FILE).is_file() or bool(_complete(folder) or _complete(folder / "checkpoints"))

    @staticmethod
    def is_leftover(folder: Path) -> bool:
        """Whether it is of a save that was never completed."""
        return _LEFTOVER.fullmatch(folder.name) is not None

    @staticmethod
    def resolve(path: str | Path, *, key: str = "checkpoint.load", rollout_id: int | None = None) -> Checkpoint:
        """The checkpoint that `key` names: its folder, or the newest of a folder of them or of a run.

        With `rollout_id` that one of them.

        Raises:
            ConfigError: there is no checkpoint at that place.
            DataError: there is one that cannot be read.
        """
        folder = Path(path).expanduser()
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
            rule, fix = f"name a folder with the checkpoint of rollout {rollout_id}", f"there is {found}"
            raise ConfigError([Problem(path=key, rule=rule, value=repr(str(path)), fix=fix)])
        fix = "give the folder of a checkpoint, of a run, or one that holds checkpoints"
        if _LEFTOVER.fullmatch(folder.name):
            fix = "that save was never completed; " + fix
        raise ConfigError([Problem(path=key, rule="name a complete checkpoint", value=repr(str(path)), fix=fix)])

    def _prune(self) -> None:
        for old in _complete(self._folder)[: -self._keep_last]:
            _delete(old)

    def _temporary(self, rollout_id: int) -> Path:
        return _beside(self._final(rollout_id), _SAVING)

    def _final(self, rollout_id: int) -> Path:
        return self._folder / _name(rollout_id)


def _name(rollout_id: int) -> str:
    return f"rollout_{rollout_id:08d}"


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def _delete(folder: Path) -> None:
    """Renames first: a deletion that is interrupted must not leave half a checkpoint under a final name."""
    shutil.rmtree(folder.rename(_beside(folder, _DELETING)))


def _settle_replaced(replaced: Path) -> None:
    """Deletes a replaced checkpoint, or gives it its name back where its replacement never got there."""
    final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
    if final.exists():
        _delete(replaced)
    else:
        replaced.rename(final)


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [path for path in folder.glob("rollout_*") if _COMPLETE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("rollout_")))


def _read(folder: Path) -> Checkpoint:
    file = folder / STATE_FILE
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        checkpoint = Checkpoint(folder=folder, rollout_id=int(about["rollout_id"]), state=about["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{file} must be the state of a checkpoint, got {cause}; delete {folder} to go on from the one before"
        ) from error
    if about.get("format") != FORMAT:
        raise DataError(
            f"{file} must be of format {FORMAT}, got {about.get('format')!r}; load it with the version that wrote it"
        )
    return checkpoint


def _flush_tree(folder: Path) -> None:
    """Brings every file and folder below `folder` to the disk, so that the rename after it cannot overtake them."""
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
