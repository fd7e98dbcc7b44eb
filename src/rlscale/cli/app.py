"""The front of `rlscale-train`: from the words of a command line to jobs that run, and what a user sees of it.

Imports neither torch nor Ray: a mistake, `--help` and `--cfg job` answer at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import rlscale
from rlscale.cli.arguments import Arguments, parse_arguments
from rlscale.cli.mistakes import mistakes_text
from rlscale.cli.usage import usage
from rlscale.config import LoadedConfig, RunConfig, load_config_with_notes, to_yaml
from rlscale.config.errors import show
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import ONE_VALUE
from rlscale.config.load import with_origin
from rlscale.errors import (
    CheckError,
    ConfigError,
    DataError,
    EngineError,
    Problem,
    RewardError,
    WeightSyncError,
    WorkerError,
)
from rlscale.secrets import redact_yaml

OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

RUN_FAILURES = (WorkerError, EngineError, WeightSyncError, RewardError, CheckError)
"""Failures that name their cause; anything else is a defect of ours and shows its traceback."""


class JobResult(Protocol):
    """What a job returns."""

    @property
    def objective(self) -> float | None: ...

    @property
    def run_dir(self) -> Path: ...


RunJob = Callable[[RunConfig], JobResult]
Report = Callable[[RunConfig, Any], None]
CheckJob = Callable[[RunConfig], Sequence[Problem]]


def check_nothing(config: RunConfig) -> Sequence[Problem]:
    """Finds everything right."""
    return ()


def no_report(config: RunConfig, result: Any) -> None:
    """Shows nothing."""


def main_train(
    argv: Sequence[str], *, run_job: RunJob, report: Report = no_report, check_job: CheckJob = check_nothing
) -> int:
    """Runs the command `rlscale-train`.

    Args:
        argv: the words after the command's name.
        run_job: runs one config; called only once every config of the command is right.
        report: shows the result of a single run; a sweep ends in a table instead.
        check_job: tells what is wrong with a config that loads, before anything starts: with the user code it names.

    Returns: the exit code. 0: done. 1: the run, or a job of a sweep, failed. 2: the input is wrong. 130: interrupted.
    """
    try:
        return _run(parse_arguments(argv), run_job, report, check_job)
    except ConfigError as error:
        sys.stderr.write(mistakes_text("rlscale-train", error))
        return WRONG_INPUT
    except DataError as error:
        sys.stderr.write(f"rlscale-train: {error}\n")
        return WRONG_INPUT
    except RUN_FAILURES as error:
        sys.stderr.write(_failure_text(error))
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("rlscale-train: interrupted\n")
        return INTERRUPTED


def _run(arguments: Arguments, run_job: RunJob, report: Report, check_job: CheckJob) -> int:
    if arguments.help:
        sys.stdout.write(usage(ConfigFolders.find(arguments.config_dir).groups()))
        return OK
    if arguments.completion is not None:
        # Only here, and likewise what sweeps need: everything else answers a tenth of a second sooner.
        from rlscale.config.hydra.completion import run_completion

        run_completion(arguments.completion, ConfigFolders.find(arguments.config_dir))
        return OK
    if arguments.version:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    if arguments.problems:
        raise ConfigError([*arguments.problems, *_problems_of(arguments)])
    if arguments.multirun:
        return _run_sweep(arguments, run_job, check_job)
    loaded = load_config_with_notes(arguments.overrides, config_dir=arguments.config_dir)
    if arguments.show_config:
        sys.stdout.write(redact_yaml(to_yaml(loaded.config)))
        return OK
    if problems := check_job(loaded.config):
        raise ConfigError([with_origin(problem, loaded.composed) for problem in problems])
    _tell_notes(loaded)
    try:
        result = run_job(loaded.config)
    except ConfigError as error:  # files, folders and clusters that are not as the config says
        raise ConfigError([with_origin(problem, loaded.composed) for problem in error.problems]) from error
    report(loaded.config, result)
    return OK


def _failure_text(error: BaseException) -> str:
    """One line for the cause; behind a failed reward the traceback of the user's own code."""
    text = f"rlscale-train: the run failed: {error}\n"
    if isinstance(error, RewardError) and error.__cause__ is not None:
        text += "".join(traceback.format_exception(error.__cause__))
    return text


def _problems_of(arguments: Arguments) -> tuple[Problem, ...]:
    """What is wrong with the overrides, beside the flags."""
    try:
        load_config_with_notes(arguments.overrides, config_dir=arguments.config_dir)
    except ConfigError as error:
        # That a sweep is none is told of -m itself.
        return tuple(each for each in error.problems if not (arguments.multirun and each.rule == ONE_VALUE))
    return ()


def _tell_notes(loaded: LoadedConfig) -> None:
    """Warnings, and values that were replaced by others."""
    replaced = (f"{derived} (was {show(derived.was)})" for derived in loaded.derived if derived.is_notable)
    sys.stderr.writelines(f"note: {line}\n" for line in replaced)
    sys.stderr.writelines(f"warning: {line}\n" for line in loaded.warnings)


def _run_sweep(arguments: Arguments, run_job: RunJob, check_job: CheckJob) -> int:
    from rich.console import Console

    from rlscale.config.hydra.sweep import run_sweep
    from rlscale.observe.sweep_results import closing_lines, make_table, write_sweep

    def run_loaded(index: int, loaded: LoadedConfig) -> float | None:
        sys.stderr.write(f"\njob {index + 1}: {' '.join(loaded.overrides)}\n")
        _tell_notes(loaded)
        try:
            return run_job(loaded.config).objective
        except (ConfigError, DataError) as error:
            sys.stderr.write(f"job {index + 1} failed: {error}\n")
            raise
        except RUN_FAILURES as error:
            sys.stderr.write(f"job {index + 1}: {_failure_text(error)}")
            raise
        except Exception:
            sys.stderr.write(f"job {index + 1} failed:\n{traceback.format_exc()}")
            raise

    result = run_sweep(
        arguments.overrides, run_loaded=run_loaded, config_dir=arguments.config_dir, check_config=check_job
    )
    files = write_sweep(result)
    Console().print(make_table(result))
    sys.stdout.writelines(f"{line}\n" for line in closing_lines(result, files))
    if result.interrupted:
        raise KeyboardInterrupt
    return FAILED if any(job.error for job in result.jobs) else OK
