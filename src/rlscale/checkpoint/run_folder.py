"""The folder of one run: who owns it, whether it is new, unfinished or done.

runs/quickstart-1a2b3c4d/
  config.yaml provenance.json   what was run
  run.lock                      held by the driver while it lives
  metrics.jsonl logs/           what happened
  checkpoints/ hf/              what was made
  finished.json                 written last
"""

import fcntl
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import CheckpointConfig, changed_keys
from rlscale.errors import ConfigError, Problem

_FINISHED, _IDENTITY, _LOCK = "finished.json", "identity.json", "run.lock"


@dataclass(kw_only=True)
class RunFolder:
    """A run folder that this process holds the lock of, until `close`.

    `resumed` is true when an unfinished run was found in it.
    """

    path: Path
    resumed: bool
    changed: tuple[str, ...]  # keys whose values are others than when the unfinished run was started
    skipped: Path | None  # the finished run that had the wanted name
    _lock: IO[str]

    @classmethod
    def open(cls, wanted: Path, *, config_yaml: str, resume_changed: bool = False) -> "RunFolder":
        """Takes `wanted` when it is new or unfinished; behind a finished run the next free `wanted-2`, `wanted-3`, ...

        Args:
            config_yaml: the resolved config without its secrets; what an unfinished run has to agree with.
            resume_changed: go on with an unfinished run of another config.

        Raises:
            ConfigError: another process runs in it, or it holds an unfinished run of another config.
        """
        path, lock = _take_unfinished(wanted)
        try:
            resumed, changed = _compare(path, config_yaml, resume_changed=resume_changed)
        except BaseException:
            lock.close()
            raise
        skipped = wanted if path != wanted else None
        return cls(path=path, resumed=resumed, changed=changed, skipped=skipped, _lock=lock)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    def place_of_checkpoints(self, config: CheckpointConfig) -> Path:
        """`checkpoint.save`. Behind a finished run it gets the number that the run folder has got.

        Raises:
            ConfigError: a new run would find checkpoints of another one there, and take them for its own when resumed.
        """
        assert config.save is not None, "set by the resolve step"
        place, wanted = Path(config.save), self.skipped or self.path
        if place == wanted / "checkpoints":
            place = self.path / "checkpoints"
        else:
            place = place.with_name(place.name + self.path.name.removeprefix(wanted.name))
        begins_there = config.load is not None and place.resolve() in _self_and_parent(Path(config.load).expanduser())
        if self.resumed or begins_there or not CheckpointStore.is_one(place):
            return place
        (self.path / _IDENTITY).unlink()  # else the next start would find a run to go on with
        go_on = f"checkpoint.load={shlex.quote(str(place))}"
        raise ConfigError(
            [
                Problem(
                    path="checkpoint.save",
                    rule="be a folder without checkpoints of another run",
                    value=str(place),
                    fix=f"choose another folder, or go on from what is in it with {go_on}",
                )
            ]
        )

    def finish(self, result: dict[str, Any]) -> None:
        """Marks the run as done; a later start with the same config gets a new folder."""
        write_json(self.path / _FINISHED, result)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _self_and_parent(path: Path) -> tuple[Path, Path]:
    return path.resolve(), path.resolve().parent


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a JSON file in one step, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _take_unfinished(wanted: Path) -> tuple[Path, IO[str]]:
    """The first of `wanted`, `wanted-2`, ... that holds no finished run, and its lock."""
    path, number = wanted, 1
    while True:
        if not (path / _FINISHED).exists():
            lock = _take_lock(path)
            if not (path / _FINISHED).exists():  # a run that ended meanwhile is finished before it lets go of the lock
                return path, lock
            lock.close()
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")


def _take_lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("a+")
    except OSError as error:
        rule, fix = "name a folder that can be written", f"{error.strerror or error}; choose another run.dir"
        raise ConfigError([Problem(path="run.dir", rule=rule, value=str(path), fix=fix)]) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            [
                Problem(
                    path="run.dir",
                    rule="be a folder that no other run is using",
                    value=f"{path} (in use by process {owner})",
                    fix="wait for that run, or choose another run.dir",
                )
            ]
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _compare(path: Path, config_yaml: str, *, resume_changed: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether there is a run to go on with, and in which keys it was another one; takes down this run's config."""
    identity = path / _IDENTITY
    resumed = identity.exists()
    before = json.loads(identity.read_text())["config"] if resumed else config_yaml
    changed = tuple(changed_keys(before, config_yaml))
    if changed and not resume_changed:
        raise ConfigError(
            [
                Problem(
                    path="run.dir",
                    rule="be new or hold an unfinished run of the same config",
                    value=f"{path}, whose run differs in {'; '.join(changed)}",
                    fix="choose another run.dir, or go on all the same with run.resume_changed=true",
                )
            ]
        )
    if changed or not resumed:
        write_json(identity, {"config": config_yaml})
    return resumed, changed
