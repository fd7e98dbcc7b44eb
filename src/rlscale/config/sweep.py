"""Several jobs from one command line, by Hydra's own sweepers and launchers.

    words ─ parse ─> Sweeper ─ words of each job ─> CheckedLauncher ─ all right? ─> Launcher ─> jobs, one by one

Hydra would start the first job before it looks at the second one's values, and would end with the first failure's
traceback. So a launcher of ours stands before the one that was chosen: it checks every job of a batch first, and it
collects what each job made of itself.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlscale.config.compose import make_loader
from rlscale.config.folder import PRIMARY, ConfigFolders
from rlscale.config.load import Loaded, load_config_with_notes
from rlscale.config.overrides import CommandLine, parse_command_line
from rlscale.errors import ConfigError, Problem

SWEEPS_FOLDER = "runs/sweeps"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """How one job of a sweep ended."""

    index: int  # 0-based
    overrides: tuple[str, ...]  # of this job, as a user would type them
    seconds: float
    run_dir: str
    objective: float | None = None
    error: str | None = None  # None: it succeeded


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """All jobs of a sweep, in order."""

    folder: Path
    jobs: tuple[JobRecord, ...]


class Outcome(float):
    """The objective that a sweeper optimises (NaN: failed, or none) together with the record of its job."""

    record: JobRecord

    def __new__(cls, record: JobRecord) -> Outcome:
        outcome = super().__new__(cls, math.nan if record.objective is None else record.objective)
        outcome.record = record
        return outcome

    def __reduce__(self) -> tuple[type[Outcome], tuple[JobRecord]]:
        return type(self), (self.record,)


RunLoaded = Callable[[int, Loaded], float | None]
"""Runs a job, given its 0-based number; returns its objective."""


def run_sweep(words: Sequence[str], *, run_loaded: RunLoaded, config_dir: Path | None = None) -> SweepResult:
    """Runs every job that `words` stand for; a job that raises does not end the sweep.

    Args:
        words: a command line in which keys and groups may have several values, e.g. `algo.eps_clip=0.1,0.2`.
        run_loaded: called in order, once all jobs are known to be right.
        config_dir: as in `load_config`.

    Raises: ConfigError with the mistakes of all jobs, before the first one starts.
    """
    folders = ConfigFolders.find(config_dir)
    line = parse_command_line(words, folders.groups(), multirun=True)
    checker = _JobChecker(config_dir)
    checker.check(_expand(line), known=line.problems)
    loader = make_loader(folders)
    hydra = Hydra(task_name="rlscale", config_loader=loader)
    master = hydra.compose_config(
        config_name=PRIMARY,
        overrides=[*line.words, *_sweep_folder(line)],
        run_mode=RunMode.MULTIRUN,
        with_log_configuration=False,
    )
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    sweeper: Any = Plugins.instance().instantiate_sweeper(
        config=master, hydra_context=context, task_function=_task(run_loaded, config_dir)
    )
    launcher = CheckedLauncher(sweeper.launcher, checker)
    sweeper.launcher = launcher
    sweeper.sweep(arguments=list(master.hydra.overrides.task))
    return SweepResult(folder=Path(master.hydra.sweep.dir), jobs=tuple(launcher.records))


class CheckedLauncher(Launcher):
    """Checks all jobs of a batch, hands them to the real launcher, and keeps the records they return."""

    def __init__(self, inner: Launcher, checker: _JobChecker) -> None:
        self._inner, self._checker = inner, checker
        self.records: list[JobRecord] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._inner.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self._checker.check(job_overrides)  # a sweeper may choose values that were not known before
        returns = self._inner.launch(job_overrides, initial_job_idx)
        self.records += [job.return_value.record for job in returns]
        return returns


def _task(run_loaded: RunLoaded, config_dir: Path | None) -> TaskFunction:
    def run(_: DictConfig) -> Outcome:
        hydra = HydraConfig.get()
        overrides = _typed(OmegaConf.to_container(hydra.overrides.task))
        loaded = load_config_with_notes(overrides, config_dir=config_dir)
        index, began = int(hydra.job.num), time.monotonic()
        record = JobRecord(index=index, overrides=overrides, seconds=0.0, run_dir=str(loaded.config.run.dir))
        try:
            objective = run_loaded(index, loaded)
        except Exception as error:  # one job's failure is a row of the table, whatever it is
            record = replace(record, error=f"{type(error).__name__}: {error}")
        else:
            record = replace(record, objective=objective)
        return Outcome(replace(record, seconds=time.monotonic() - began))

    return run


class _JobChecker:
    """Loads jobs to find their mistakes before any of them runs; a job that was checked is not checked again."""

    def __init__(self, config_dir: Path | None) -> None:
        self._config_dir = config_dir
        self._checked: dict[tuple[str, ...], str] = {}  # words of a job -> its folder

    def check(self, jobs: Sequence[Sequence[str]], *, known: Sequence[Problem] = ()) -> None:
        """Raises ConfigError with `known` and every problem of every job, each once."""
        problems = dict.fromkeys(known)
        for words in map(_typed, jobs):
            if words in self._checked:
                continue
            try:
                folder = str(load_config_with_notes(words, config_dir=self._config_dir).config.run.dir)
            except ConfigError as error:
                problems.update(dict.fromkeys(error.problems))
                continue
            if folder in self._checked.values():
                fix = "leave run.dir and run.name out, and give each value once"
                problem = Problem(path="run.dir", rule="differ between the jobs of a sweep", value=folder, fix=fix)
                problems[problem] = None
            self._checked[words] = folder
        if problems:
            raise ConfigError(list(problems))


def _expand(line: CommandLine) -> list[list[str]]:
    """The jobs that the words which are right stand for, as far as they are known before a sweeper chooses values."""
    overrides = OverridesParser.create().parse_overrides(line.words)
    own = [override for override in overrides if not override.is_hydra_override()]
    discrete = [override for override in own if not override.is_sweep_override() or override.is_discrete_sweep()]
    return [job for batch in BasicSweeper.split_arguments(discrete, None) for job in batch]


def _sweep_folder(line: CommandLine) -> list[str]:
    if any(word.startswith("hydra.sweep.dir=") for word in line.words):
        return []
    digest = hashlib.sha256("\n".join(line.words).encode()).hexdigest()[:8]
    return [f'hydra.sweep.dir="{SWEEPS_FOLDER}/{line.experiment}-{digest}"']


def _typed(words: Any) -> tuple[str, ...]:
    """Words as a user would type them, without the `+` that Hydra wants."""
    assert isinstance(words, Sequence) and not isinstance(words, Mapping)
    return tuple(str(word).lstrip("+") for word in words)
