"""What stands between a sweeper and the launcher that was chosen: jobs are checked, and their records collected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rlscale.config.hydra.grammar import is_readable
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.hydra.sweep.records import JobRecord, Outcome, RecordFolder
from rlscale.config.load import load_config_with_notes, with_origin
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem

Groups = Mapping[str, Sequence[str]]
"""The options of every group."""

CheckConfig = Callable[[RunConfig], Sequence[Problem]]

DIED = "its process died; the log of the machine says why (out of memory?)"


_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


class JobChecker:
    """Loads jobs to find their mistakes before any of them runs; a job that was checked is not checked again."""

    def __init__(self, config_dir: Path | None, check_config: CheckConfig | None = None) -> None:
        """Args: check_config: tells what is wrong with a job that loads."""
        self._config_dir, self._check_config = config_dir, check_config
        self.folders: dict[frozenset[str], str] = {}  # of the run, by the words of a job in whatever order

    def check(self, jobs: Sequence[Sequence[str]], *, known: Sequence[Problem] = ()) -> None:
        """Raises ConfigError with `known` and every problem of every job, each once."""
        problems = dict.fromkeys(known)
        for words in map(typed, jobs):
            problems.update(dict.fromkeys(self.problems_of(words)))
        if problems:
            raise ConfigError(list(problems))

    def check_some(self, jobs: Sequence[Sequence[str]], *, known: Sequence[Problem] = ()) -> None:
        """Raises ConfigError with `known`, or with the problems of the first job when every one has some.

        For jobs of which a sweeper runs other combinations: what is wrong in one of them need not be in those.
        """
        problems = [self.problems_of(words) for words in map(typed, jobs)]
        if known or all(problems):
            raise ConfigError(list(dict.fromkeys([*known, *(problems[0] if all(problems) else ())])))

    def problems_of(self, words: tuple[str, ...]) -> tuple[Problem, ...]:
        """What is wrong with one job; that its folder is another one's counts too."""
        if frozenset(words) in self.folders:
            return ()
        try:
            loaded = load_config_with_notes(words, config_dir=self._config_dir)
        except ConfigError as error:
            return error.problems
        config = loaded.config
        if self._check_config is not None and (problems := self._check_config(config)):
            return tuple(with_origin(problem, loaded.composed) for problem in problems)
        folder = str(config.run.dir)
        taken = folder in self.folders.values()
        self.folders[frozenset(words)] = folder
        if not taken:
            return ()
        fix = "leave run.dir and run.name out, and give each value once"
        return (Problem(path="run.dir", rule="differ between the jobs of a sweep", value=folder, fix=fix),)


class CheckedLauncher(Launcher):
    """Checks all jobs of a batch, hands them to the real launcher, and keeps the records they return.

    A job whose words ran before is not run again: a sweeper that chooses values may choose the same ones twice.
    """

    def __init__(
        self, inner: Launcher, checker: JobChecker, files: RecordFolder, *, groups: Groups, tolerant: bool
    ) -> None:
        """Args: tolerant: a job that is wrong is a row like one that failed, also before anything has run."""
        self._inner, self._checker, self.files, self._groups = inner, checker, files, groups
        self._tolerant = tolerant
        self.records: list[JobRecord] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._inner.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        jobs = [typed(words) for words in job_overrides]
        if not self.records and not self._tolerant:
            self._checker.check(jobs)  # nothing has run yet, so nothing is lost by stopping here
        known = {record.overrides for record in self.records}
        wrong: dict[tuple[str, ...], str] = {}
        for words in (words for words in dict.fromkeys(jobs) if words not in known):
            if problems := self._checker.problems_of(words):
                wrong[words] = "; ".join(map(str, problems))
        self.records += self._run([words for words in dict.fromkeys(jobs) if words not in known and words not in wrong])
        for words, error in wrong.items():  # of values chosen while the sweep runs: a row of the table
            self.records.append(self._failed(len(self.records), words, error))
        by_words = {record.overrides: record for record in self.records}
        return [_as_return(by_words[words]) for words in jobs]

    def _run(self, jobs: Sequence[tuple[str, ...]]) -> list[JobRecord]:
        if not jobs:
            return []
        first = len(self.records)
        try:
            returns = self._inner.launch([self._for_hydra(words) for words in jobs], first)
        except BrokenProcessPool:
            # One process died, and the others of the pool were ended with it. Which one it was shows when each job
            # that has not ended runs by itself; it goes on where its run folder is.
            return [self.files.read(index) or self._run_alone(index, words) for index, words in enumerate(jobs, first)]
        return [job.return_value.record for job in returns]

    def _run_alone(self, index: int, words: tuple[str, ...]) -> JobRecord:
        try:
            (job,) = self._inner.launch([self._for_hydra(words)], index)
        except BrokenProcessPool:
            return self._failed(index, words, DIED)
        record: JobRecord = job.return_value.record
        return record

    def _failed(self, index: int, words: tuple[str, ...], error: str) -> JobRecord:
        folder = self._checker.folders.get(frozenset(words), "")
        record = JobRecord(index=index, overrides=words, seconds=0.0, run_dir=folder, error=error)
        self.files.write(record)
        return record

    def _for_hydra(self, words: tuple[str, ...]) -> list[str]:
        return parse_command_line(words, self._groups).overrides


def typed(words: Any) -> tuple[str, ...]:
    """Words as a user would type them, without the `+` and `~` that Hydra wants; the experiment is always among them.

    Of several words for a key the last one counts, and is the only one here.
    """
    assert isinstance(words, Sequence) and not isinstance(words, Mapping)
    read = (_unescaped(_without_sign(str(word))) for word in words)
    plain = tuple({word.partition("=")[0]: word for word in read}.values())
    return plain if any(word.startswith("experiment=") for word in plain) else ("experiment=null", *plain)


def _without_sign(word: str) -> str:
    if word.startswith("~"):  # Hydra's sweepers write `~algo=null` for the `~algo` that they were given
        return f"{word[1:].partition('=')[0]}=null"
    return word.lstrip("+")


def _unescaped(word: str) -> str:
    """Without the backslashes that Hydra puts into the values of a sweep, where they are not needed."""
    plain = _ESCAPED.sub(r"\1", word)
    if plain == word or not is_readable(plain):
        return word
    parser = OverridesParser.create()
    return plain if parser.parse_override(plain).value() == parser.parse_override(word).value() else word


def _as_return(record: JobRecord) -> JobReturn:
    return JobReturn(overrides=record.overrides, _return_value=Outcome(record), status=JobStatus.COMPLETED)
