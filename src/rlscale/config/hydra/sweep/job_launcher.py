"""A launcher between the sweeper and the selected launcher: checks jobs and collects their records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rlscale.config.advice import Advisor
from rlscale.config.hydra.compose import compose
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.grammar import is_parsable
from rlscale.config.hydra.internals import override_parser
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.hydra.sweep.records import JobOutcome, JobRecord, RecordFolder
from rlscale.config.load import CheckConfig, check_nothing, load_config_with_notes
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem

Groups = Mapping[str, Sequence[str]]
"""The options of every group."""

DIED = "its process died; see the log of the machine (out of memory?)"
LOST = "it has no result; if it still runs, rlscale-sweep shows the result later"


_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


class JobChecker:
    """Loads jobs to find their problems before any of them runs; checks each job once."""

    def __init__(self, config_dir: Path | None, check_config: CheckConfig = check_nothing) -> None:
        """Args: check_config: as in `load_config_with_notes`."""
        self._config_dir, self._check_config = config_dir, check_config
        self.folders: dict[frozenset[str], str] = {}  # run folder by the overrides of a job, in any order
        self.configs: list[RunConfig] = []  # of the valid jobs

    def check(self, jobs: Sequence[Sequence[str]], *, known: Sequence[Problem] = ()) -> None:
        """Raises ConfigError with `known` and the problems of all jobs, each once."""
        problems = dict.fromkeys(self._advised(known, jobs))
        for overrides in map(user_overrides, jobs):
            problems.update(dict.fromkeys(self.find_problems(overrides)))
        if problems:
            raise ConfigError(list(problems))

    def check_some(self, jobs: Sequence[Sequence[str]], *, known: Sequence[Problem] = ()) -> None:
        """Raises ConfigError with `known`, or with the problems of the first job when every job has some.

        For a sweeper that runs other combinations than `jobs`: a problem of one job need not be in those.
        """
        problems = [self.find_problems(overrides) for overrides in map(user_overrides, jobs)]
        if known or all(problems):
            advised = self._advised(known, jobs)
            raise ConfigError(list(dict.fromkeys([*advised, *(problems[0] if all(problems) else ())])))

    def _advised(self, problems: Sequence[Problem], jobs: Sequence[Sequence[str]]) -> list[Problem]:
        """Problems of the command line of the sweep, with the values that apply without their overrides."""
        if not problems or not jobs:
            return list(problems)
        folders = ConfigFolders.find(self._config_dir)
        line = parse_command_line(user_overrides(jobs[0]), folders.groups())
        advisor = Advisor(composed=compose(line.overrides, command_line_keys=line.keys, folders=folders))
        return [advisor.complete(problem) for problem in problems]

    def find_problems(self, overrides: tuple[str, ...]) -> tuple[Problem, ...]:
        """Problems of one job; a run folder that another job uses is one."""
        if frozenset(overrides) in self.folders:
            return ()
        try:
            loaded = load_config_with_notes(overrides, config_dir=self._config_dir, check=self._check_config)
        except ConfigError as error:
            return error.problems
        self.configs.append(loaded.config)
        folder = str(loaded.config.run.dir)
        is_taken = folder in self.folders.values()
        self.folders[frozenset(overrides)] = folder
        if not is_taken:
            return ()
        fix = "remove run.dir and run.name, and list each value once"
        return (Problem(path="run.dir", rule="differ between the jobs of a sweep", value=folder, fix=fix),)


class CheckedLauncher(Launcher):
    """Checks all jobs of a batch, passes them to the selected launcher, and collects their records.

    Jobs with the same overrides run once: a sweeper that chooses values may choose the same ones twice.
    """

    def __init__(
        self, inner: Launcher, checker: JobChecker, files: RecordFolder, *, groups: Groups, tolerant: bool
    ) -> None:
        """Args: tolerant: record an invalid job as failed, even when nothing has run yet, instead of raising.

        Jobs with a record in `files` are not run again.
        """
        self._inner, self._checker, self.files, self._groups = inner, checker, files, groups
        self._tolerant = tolerant
        self.records = list(files.read_all())

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._inner.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        jobs = [user_overrides(overrides) for overrides in job_overrides]
        if not self.records and not self._tolerant:
            self._checker.check(jobs)  # nothing has run yet, so raising loses nothing
        known = {record.overrides for record in self.records}
        # dict.fromkeys removes duplicates and keeps the order.
        new_jobs = [job for job in dict.fromkeys(jobs) if job not in known]
        invalid: dict[tuple[str, ...], str] = {}
        for job in new_jobs:
            if problems := self._checker.find_problems(job):
                invalid[job] = "; ".join(map(str, problems))
        self.records += self._run([job for job in new_jobs if job not in invalid])
        for job, error in invalid.items():
            self.records.append(self._failed(self._next_index, job, error))
        by_overrides = {record.overrides: record for record in self.records}
        return [_as_return(by_overrides[job]) for job in jobs]

    def _run(self, jobs: Sequence[tuple[str, ...]]) -> list[JobRecord]:
        if not jobs:
            return []
        first = self._next_index
        try:
            returns = self._inner.launch([self._for_hydra(job) for job in jobs], first)
        except BrokenProcessPool:
            # One process died and the pool killed the others. Run each unfinished job alone to find the one that
            # dies; the others resume from their run folders.
            return [self.files.read(index) or self._run_alone(index, job) for index, job in enumerate(jobs, first)]
        except Exception as error:  # of a launcher whose jobs run elsewhere: submitit raises that of the first lost job
            text = f"{LOST} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            return [self.files.read(index) or self._failed(index, job, text) for index, job in enumerate(jobs, first)]
        return [done.return_value.record for done in returns]

    @property
    def _next_index(self) -> int:
        return max((record.index for record in self.records), default=-1) + 1

    def _run_alone(self, index: int, overrides: tuple[str, ...]) -> JobRecord:
        try:
            (done,) = self._inner.launch([self._for_hydra(overrides)], index)
        except BrokenProcessPool:
            return self._failed(index, overrides, DIED)
        record: JobRecord = done.return_value.record
        return record

    def _failed(self, index: int, overrides: tuple[str, ...], error: str) -> JobRecord:
        folder = self._checker.folders.get(frozenset(overrides), "")
        record = JobRecord(index=index, overrides=overrides, seconds=0.0, run_dir=folder, error=error)
        self.files.write(record)
        return record

    def _for_hydra(self, overrides: tuple[str, ...]) -> list[str]:
        return parse_command_line(overrides, self._groups).overrides


def user_overrides(overrides: Any) -> tuple[str, ...]:
    """Overrides as a user types them, without the `+` and `~` of Hydra's syntax; always includes the experiment.

    Of several overrides of a key only the last one is kept, because it counts.
    """
    assert isinstance(overrides, Sequence) and not isinstance(overrides, Mapping)
    plain = (_unescaped(_without_sign(str(override))) for override in overrides)
    last = tuple({override.partition("=")[0]: override for override in plain}.values())
    return last if any(override.startswith("experiment=") for override in last) else ("experiment=null", *last)


def _without_sign(override: str) -> str:
    if override.startswith("~"):  # Hydra's sweepers write `~algo=null` for `~algo`
        return f"{override[1:].partition('=')[0]}=null"
    return override.lstrip("+")


def _unescaped(override: str) -> str:
    """Removes the backslashes that Hydra adds to the values of a sweep, if they are not needed."""
    plain = _ESCAPED.sub(r"\1", override)
    if plain == override or not is_parsable(plain):
        return override
    parser = override_parser()
    return plain if parser.parse_override(plain).value() == parser.parse_override(override).value() else override


def _as_return(record: JobRecord) -> JobReturn:
    return JobReturn(overrides=record.overrides, _return_value=JobOutcome(record), status=JobStatus.COMPLETED)
