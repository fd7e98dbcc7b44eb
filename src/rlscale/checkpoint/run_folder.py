"""The folder of one run: its lock, and its state (new, unfinished or finished).

runs/quickstart-1a2b3c4d/
  config.yaml provenance.json   config and origin of the run
  identity.json                 config that a later start is compared with
  run.lock                      locked by the driver until it exits
  metrics.jsonl logs/           record of the run
  checkpoints/ hf/              results of the run
  finished.json                 written last
"""

import fcntl
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import CheckpointConfig, changed_keys
from rlscale.errors import ConfigError, Problem

log = logging.getLogger(__name__)

_FINISHED, _IDENTITY, _LOCK = "finished.json", "identity.json", "run.lock"


@dataclass(kw_only=True)
class RunFolder:
    """A run folder whose lock this process holds until `close`.

    `resumed` is true when the folder contains an unfinished run.
    """

    path: Path
    resumed: bool
    changed: tuple[str, ...]  # keys whose values differ from those of the unfinished run
    skipped: Path | None  # the finished run that has the wanted name
    _lock: IO[str]
    _save_lock: IO[str] | None = None  # of `checkpoint.save`, if that is another folder

    @classmethod
    def open(cls, wanted: Path, *, config_yaml: str, resume_changed: bool = False) -> "RunFolder":
        """Opens `wanted` if it is new or unfinished; after a finished run the next free `wanted-2`, `wanted-3`, ...

        Args:
            config_yaml: the resolved config without its secrets; an unfinished run must have the same.
            resume_changed: resume an unfinished run of another config.

        Raises:
            ConfigError: another process runs in it, or it contains an unfinished run of another config.
        """
        path, lock = _lock_unfinished(wanted)
        try:
            resumed, changed = _compare_identity(path, config_yaml, resume_changed=resume_changed)
        except BaseException:
            lock.close()
            raise
        skipped = wanted if path != wanted else None
        return cls(path=path, resumed=resumed, changed=changed, skipped=skipped, _lock=lock)

    @staticmethod
    def check(wanted: Path) -> list[Problem]:
        """Problems that `open` would raise for any config, without creating or locking anything."""
        path = _first_unfinished(wanted)
        if problem := unwritable("run.dir", path):
            return [problem]
        owner = _living_owner(path / _LOCK)
        return [] if owner is None else [_in_use(path, owner)]

    @staticmethod
    def check_config(wanted: Path, config_yaml: Callable[[], str], *, resume_changed: bool = False) -> list[Problem]:
        """The problem of an unfinished run of another config, or without a readable one.

        Args:
            config_yaml: returns the argument of `open`; called only if there is a run to compare with.
            resume_changed: as in `open`.
        """
        path = _first_unfinished(wanted)
        if not (path / _IDENTITY).is_file():
            return []
        try:
            before, after = _recorded_config(path), config_yaml()
        except ConfigError as error:
            return list(error.problems)
        # Equal texts need not be parsed, which takes a tenth of a second.
        changed = changed_keys(before, after) if before != after else []
        return [_other_config(path, changed)] if changed and not resume_changed else []

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """Outcomes of all trajectories; see `rollout/ledger.py`."""
        return self.path / "ledger.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    def checkpoint_folder(self, config: CheckpointConfig, *, is_renumbered: bool = False) -> Path:
        """Returns `checkpoint.save`, after a finished run with the number of the run folder appended.

        Args:
            is_renumbered: the run starts at `data.start_rollout_id`.

        Raises:
            ConfigError: the folder of a new run has checkpoints of another run, from which it would resume later, or
                another run uses it.
        """
        assert config.save is not None, "set by the resolve step"
        folder, wanted = Path(config.save), self.skipped or self.path
        if folder == wanted / "checkpoints":
            folder = self.path / "checkpoints"
        else:
            folder = folder.with_name(folder.name + self.path.name.removeprefix(wanted.name))
        place = folder.resolve()
        if self._save_lock is None and self.path.resolve() not in (place, *place.parents):
            self._lock_checkpoints(folder)
        if self.resumed or not CheckpointStore.has_checkpoint(folder):
            return folder
        # A later start resumes from the newest checkpoint, which must not be one that this run does not continue.
        load = None if config.load is None or is_renumbered else Path(config.load)
        if load is not None and CheckpointStore.continues(folder, load):
            return folder
        self._forget()
        newest = f"checkpoint.load={shlex.quote(str(folder))}"
        fix = f"choose another folder, or start from its checkpoints with {newest}"
        if is_renumbered:
            fix += " data.start_rollout_id=null"
        rule = "be a folder without checkpoints of another run"
        raise ConfigError([Problem(path="checkpoint.save", rule=rule, value=str(folder), fix=fix)])

    def _lock_checkpoints(self, folder: Path) -> None:
        """Keeps other runs, e.g. of a sweep, from the folder: they would delete and resume each other's checkpoints."""
        try:
            self._save_lock = _acquire_lock(folder, key="checkpoint.save")
        except ConfigError:
            self._forget()
            raise
        except OSError as error:  # a file system without locks
            log.warning("checkpoint.save=%s cannot be locked: %s; no other run may use it", folder, error)

    def _forget(self) -> None:
        """Lets the next start find no run, where this one is new: it would resume from checkpoints of another run."""
        if not self.resumed:
            (self.path / _IDENTITY).unlink()

    def finish(self, result: dict[str, Any]) -> None:
        """Marks the run as finished; a later start with the same config gets a new folder."""
        write_json(self.path / _FINISHED, result)

    def close(self) -> None:
        self._lock.close()
        if self._save_lock is not None:
            self._save_lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a JSON file in one step, so that a reader never sees an incomplete file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _lock_unfinished(wanted: Path) -> tuple[Path, IO[str]]:
    """Locks the first of `wanted`, `wanted-2`, ... without a finished run; returns it and its lock."""
    for path in _candidates(wanted):
        if not (path / _FINISHED).exists():
            lock = _acquire_lock(path)
            # Checked again under the lock: a run writes the file before it releases its lock.
            if not (path / _FINISHED).exists():
                return path, lock
            lock.close()
    raise AssertionError("there is always a next name")


def _candidates(wanted: Path) -> Iterator[Path]:
    """`wanted`, `wanted-2`, `wanted-3`, ..."""
    yield wanted
    for number in count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def _first_unfinished(wanted: Path) -> Path:
    return next(path for path in _candidates(wanted) if not (path / _FINISHED).exists())


def unwritable(key: str, path: Path) -> Problem | None:
    """The problem of a folder that can be neither written nor created; None: it can."""
    above = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not above.is_dir():
        return _unusable(key, path, f"{above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        return _unusable(key, path, f"{above} cannot be written")
    return None


def _unusable(key: str, path: Path, cause: str) -> Problem:
    fix = f"{cause}; choose another {key}"
    return Problem(path=key, rule="name a folder that can be written", value=str(path), fix=fix)


def _in_use(path: Path, owner: str, *, key: str = "run.dir") -> Problem:
    return Problem(
        path=key,
        rule="be a folder that no other run is using",
        value=f"{path} (in use by process {owner.strip() or 'unknown'})",
        fix=f"wait for that run, or choose another {key}",
    )


def _other_config(path: Path, changed: Sequence[str]) -> Problem:
    return Problem(
        path="run.dir",
        rule="be new or hold an unfinished run of the same config",
        value=f"{path}, whose run differs in {'; '.join(changed)}",
        fix="choose another run.dir, or resume it with run.resume_changed=true",
    )


def _living_owner(lock: Path) -> str | None:
    """The id of the process that holds the lock of a run folder; None: no process does."""
    try:
        with lock.open("r") as file:
            owner = file.read().strip()
            # Only a living owner is tested: the test itself holds the lock for a moment, in which no run could start.
            if not owner.isdecimal() or not Path(f"/proc/{owner}").exists():
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return owner
    except OSError:  # a new folder
        return None
    return None


def _acquire_lock(path: Path, *, key: str = "run.dir") -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("a+")
    except OSError as error:
        raise ConfigError([_unusable(key, path, error.strerror or str(error))]) from error
    try:
        # The kernel releases the lock when its process exits, however that happens.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read()
        lock.close()
        raise ConfigError([_in_use(path, owner, key=key)]) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _recorded_config(path: Path) -> str:
    """The config of the run in a folder. Raises ConfigError if its record was damaged."""
    try:
        config = json.loads((path / _IDENTITY).read_text())["config"]
        if isinstance(config, str):
            return config
    except (OSError, ValueError, TypeError, KeyError):
        pass  # reported below
    folder = path / "checkpoints"
    fix = "choose another folder"
    if CheckpointStore.has_checkpoint(folder):
        fix += f", and start from its checkpoints with checkpoint.load={shlex.quote(str(folder))}"
    rule = f"be new or hold a run whose {_IDENTITY} can be read"
    raise ConfigError([Problem(path="run.dir", rule=rule, value=str(path), fix=fix)])


def _compare_identity(path: Path, config_yaml: str, *, resume_changed: bool) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the folder contains a run, and the keys that differ in its config; records this run's config."""
    identity = path / _IDENTITY
    resumed = identity.exists()
    before = _recorded_config(path) if resumed else config_yaml
    changed = tuple(changed_keys(before, config_yaml))
    if changed and not resume_changed:
        raise ConfigError([_other_config(path, changed)])
    if changed or not resumed:
        # A resumed run with accepted changes is compared with its new config from now on.
        write_json(identity, {"config": config_yaml})
    return resumed, changed
