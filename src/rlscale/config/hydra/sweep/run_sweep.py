"""Runs a sweep: from a command line to the records of its jobs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlscale.config.hydra.compose import FAILURES
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.internals import Loader, compose_sweep, make_loader, sweep_context
from rlscale.config.hydra.overrides import CommandLine, parse_command_line
from rlscale.config.hydra.sweep.expand import (
    all_jobs,
    hydra_problems,
    interval_problems,
    job_problems,
    some_jobs,
    value_problems,
)
from rlscale.config.hydra.sweep.job_launcher import CheckedLauncher, JobChecker, user_overrides
from rlscale.config.hydra.sweep.optuna_sweeper import TARGET, OptunaSweeper, count_problems, register_sweeper
from rlscale.config.hydra.sweep.ray_launcher import ShareRay, register_launcher, separated, shared_ray
from rlscale.config.hydra.sweep.records import (
    Direction,
    JobOutcome,
    JobRecord,
    RecordFolder,
    SweepCommand,
    SweepResult,
)
from rlscale.config.load import CheckConfig, LoadedConfig, check_nothing, load_config_with_notes
from rlscale.config.problems import ALL_KEYS
from rlscale.errors import ConfigError, Problem

SWEEPS_FOLDER = "runs/sweeps"

RunSweepJob = Callable[[int, LoadedConfig], float | None]
"""Runs a job, given its 0-based number; returns its objective. Pickled when jobs run in processes."""


def run_sweep(
    overrides: Sequence[str],
    *,
    run_loaded: RunSweepJob,
    config_dir: Path | None = None,
    check_config: CheckConfig = check_nothing,
    share_ray: ShareRay | None = None,
    resume: bool = False,
) -> SweepResult:
    """Runs all jobs of `overrides`; the sweep continues when a job raises or its process dies.

    Args:
        overrides: a command line in which keys and groups may have several values, e.g. `algo.eps_clip=0.1,0.2`, and
            which may select `hydra/launcher` and `hydra/sweeper`.
        run_loaded: runs one job; called when all jobs that are known in advance are valid.
        config_dir: as in `load_config`.
        check_config: finds further problems of what a config names, e.g. files and packages.
        share_ray: the Ray of all jobs with `hydra/launcher=ray`. None: jobs do not use Ray.
        resume: keep the records of successful jobs in the folder, and run the others only.

    Raises: ConfigError with the problems of all jobs, before the first one starts.
    """
    folders = ConfigFolders.find(config_dir)
    line = parse_command_line(overrides, folders.groups(), multirun=True)
    if ALL_KEYS in line.broken:  # without a valid experiment every further problem is a consequence
        raise ConfigError([*line.problems, *value_problems(line)])
    loader = make_loader(folders)
    register_sweeper()
    register_launcher()
    checker = JobChecker(config_dir, check_config)
    master = _compose(line, loader, checker)
    searching = _searches(master)
    _check_jobs(line, checker, sweeper=master.hydra.sweeper if searching else None)
    folder = Path(str(master.hydra.sweep.dir))
    command = SweepCommand(
        overrides=tuple(overrides),
        config_dir=None if config_dir is None else str(config_dir),
        direction=Direction(master.hydra.sweeper.get("direction", Direction.maximize)),
        jobs=() if searching else tuple(map(user_overrides, all_jobs(line))),
    )
    with shared_ray(master, checker.configs, share_ray):
        # Remove old records only now that the sweep is valid, and Ray is there.
        files = RecordFolder(folder)
        files.clear(keep_successful=resume)
        command.write(folder)
        sweeper = _make_sweeper(master, sweep_context(loader), _task(run_loaded, config_dir, files))
        launcher = separated(master, sweeper.launcher)
        sweeper.launcher = CheckedLauncher(launcher, checker, files, groups=folders.groups(), tolerant=searching)
        interrupted = False
        try:
            sweeper.sweep(arguments=list(master.hydra.overrides.task))
        except KeyboardInterrupt:
            interrupted = True
        # The jobs of a resumed sweep got numbers after those of its records.
        files.renumber(command.jobs)
    return read_sweep(folder, interrupted=interrupted)


def _check_jobs(line: CommandLine, checker: JobChecker, *, sweeper: DictConfig | None) -> None:
    """Raises the problems of all jobs; with a `sweeper` that chooses values, those of some jobs."""
    if sweeper is None:
        if problems := job_problems(line):
            raise ConfigError([*line.problems, *problems])
        checker.check(all_jobs(line), known=[*line.problems, *interval_problems(line)])
        return
    if problems := count_problems(sweeper):
        raise ConfigError([*line.problems, *value_problems(line), *problems])
    checker.check_some(some_jobs(line), known=[*line.problems, *value_problems(line)])


def read_sweep(folder: Path, *, interrupted: bool = False) -> SweepResult:
    """The finished jobs of a sweep, in its folder; raises ConfigError when there is no sweep."""
    command = SweepCommand.read(folder)
    files = RecordFolder(folder)
    jobs, direction = tuple(files.read_all()), command.direction
    return SweepResult(
        folder=folder, jobs=jobs, direction=direction, interrupted=interrupted, unreadable=files.unreadable()
    )


def _compose(line: CommandLine, loader: Loader, checker: JobChecker) -> DictConfig:
    """The config of the sweep itself: its launcher, sweeper and folder."""
    wrong = hydra_problems(line, loader)
    if wrong:
        checker.check_some(some_jobs(line), known=[*line.problems, *wrong, *value_problems(line)])
    try:
        return compose_sweep(loader, [*line.overrides, *_sweep_folder(line)])
    except FAILURES as error:
        checker.check_some(
            some_jobs(line), known=[*line.problems, *value_problems(line)]
        )  # problems of a job are more specific
        text = str(error.__cause__ or error).splitlines()[0]
        fix = "remove the overrides of hydra one by one"
        raise ConfigError([Problem(path="hydra", rule="be composable by Hydra", value=f'"{text}"', fix=fix)]) from error


def _make_sweeper(master: DictConfig, context: HydraContext, task: TaskFunction) -> Any:
    if not _searches(master):
        return Plugins.instance().instantiate_sweeper(config=master, hydra_context=context, task_function=task)
    fields: Any = OmegaConf.to_container(master.hydra.sweeper)
    del fields["_target_"]
    # Hydra's Plugins instantiates only classes of the package hydra_plugins.
    sweeper = OptunaSweeper(**fields)
    sweeper.setup(hydra_context=context, task_function=task, config=master)
    return sweeper


def _searches(master: DictConfig) -> bool:
    """Whether optuna chooses the values of the jobs."""
    return bool(master.hydra.sweeper._target_ == TARGET)


def _task(run_loaded: RunSweepJob, config_dir: Path | None, files: RecordFolder) -> TaskFunction:
    def run(_: DictConfig) -> JobOutcome:
        hydra = HydraConfig.get()
        overrides = user_overrides(OmegaConf.to_container(hydra.overrides.task))
        loaded = load_config_with_notes(overrides, config_dir=config_dir)
        index, began = int(hydra.job.num), time.monotonic()
        record = JobRecord(index=index, overrides=overrides, seconds=0.0, run_dir=str(loaded.config.run.dir))
        try:
            objective = run_loaded(index, loaded)
        except Exception as error:  # any failure of a job becomes a row of the table
            record = replace(record, error=f"{type(error).__name__}: {error}")
        else:
            record = replace(record, objective=objective)
        record = replace(record, seconds=time.monotonic() - began)
        files.write(record)
        return JobOutcome(record)

    return run


def _sweep_folder(line: CommandLine) -> list[str]:
    if any(override.startswith("hydra.sweep.dir=") for override in line.overrides):
        return []
    # A hash of the overrides: repeating a sweep reuses its folder.
    digest = hashlib.sha256("\n".join(line.overrides).encode()).hexdigest()[:8]
    return [f'hydra.sweep.dir="{SWEEPS_FOLDER}/{line.experiment}-{digest}"']
