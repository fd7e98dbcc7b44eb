"""Implementation of `rlscale-train`: parses the command line, runs one job or a sweep, reports errors.

Imports neither torch nor Ray: config errors, `--help` and `--cfg job` are answered at once.
"""

from __future__ import annotations

import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import rlscale
from rlscale.cli.arguments import CommandArguments, parse_arguments
from rlscale.cli.long_paths import long_path_problem
from rlscale.config import LoadedConfig, RunConfig, load_config_with_notes, to_yaml
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import SINGLE_VALUE_RULE
from rlscale.config.keys import keys
from rlscale.config.load import CheckConfig, check_nothing, with_origin
from rlscale.config.problems import show
from rlscale.errors import (
    CheckError,
    ConfigError,
    DataError,
    EmptyRolloutError,
    EngineError,
    FailureShareError,
    HookError,
    Problem,
    RewardError,
    ServiceError,
    StalenessError,
    WeightSyncError,
    WorkerError,
    full_disk_advice,
)
from rlscale.secrets import redact_yaml

if TYPE_CHECKING:
    # The import takes a tenth of a second, and only sweeps need it.
    from rlscale.config.hydra.sweep import ShareRay, SweepResult

OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

RUN_FAILURES = (
    *(WorkerError, EngineError, ServiceError, WeightSyncError, RewardError, HookError, CheckError),
    *(FailureShareError, EmptyRolloutError, StalenessError),
)
"""Failures whose message names the cause; any other exception is a defect of rlscale and keeps its traceback."""

_USAGE = """\
Trains a language model with reinforcement learning.

usage: rlscale-train [flags] [group=option ...] [group.key=value ...]

examples:
  rlscale-train                                            train a small model to add, on a CPU
  rlscale-train experiment=qwen3_4b_grpo                   Qwen3-4B on one node of 8 GPUs
  rlscale-train experiment=qwen3_4b_grpo on=cpu            the same experiment here, small
  rlscale-train algo=rloo optim.lr=1e-4                    change an option and a value
  rlscale-train -m algo=grpo,rloo optim.lr=1e-5,3e-5       four jobs, a table and a plot

flags:
  -h, --help          print this text
  --version           print the version
  --cfg job           print the complete config and start nothing
  -m, --multirun      run one job for each combination of values given as a,b,c; in parallel with
                      hydra/launcher=joblib|ray; hydra/sweeper=optuna lets optuna choose the values
  --config-dir DIR    also use experiments and options from DIR, which has the layout of conf/
  -sc install=SHELL   completion for bash, zsh or fish: eval "$(rlscale-train -sc install=bash)"

groups and their options:
{groups}

groups and their number of keys (see rlscale-config help <group>, rlscale-config explain <key>):
{keys}
"""


class JobResult(Protocol):
    """The result of a job."""

    @property
    def objective(self) -> float | None: ...

    @property
    def run_dir(self) -> Path: ...


class RunnableJob(Protocol):
    """One run of a config; `rlscale.Trainer` is one."""

    def run(self) -> JobResult: ...


MakeJob = Callable[[RunConfig], RunnableJob]
Report = Callable[[RunConfig, Any], None]


def no_report(config: RunConfig, result: Any) -> None:
    """Prints nothing."""


def main_train(
    argv: Sequence[str],
    *,
    make_job: MakeJob,
    report: Report = no_report,
    check_job: CheckConfig = check_nothing,
    share_ray: ShareRay | None = None,
) -> int:
    """Runs the command `rlscale-train`.

    Args:
        argv: the arguments after the command's name.
        make_job: creates the job of one config; called only when every config of the command is valid.
        report: prints the result of a single run; a sweep prints a table instead.
        check_job: finds problems of what a config names, e.g. files and packages. They are reported together with those
            of the config, before anything starts.
        share_ray: the Ray of the jobs of a sweep with `hydra/launcher=ray`. None: jobs do not use Ray.

    Returns: the exit code. 0: done. 1: the run, or a job of a sweep, failed. 2: the input is wrong. 130: interrupted.
    """
    try:
        arguments = parse_arguments(argv)
        if _print_information(arguments):
            return OK
        if arguments.problems:
            raise ConfigError([*arguments.problems, *_override_problems(arguments, check_job)])
        if arguments.multirun:
            runner = SweepRunner(make_job=make_job, check_job=check_job, share_ray=share_ray)
            return runner.run(arguments.overrides, config_dir=arguments.config_dir)
        check = check_nothing if arguments.show_config else check_job
        loaded = load_config_with_notes(arguments.overrides, config_dir=arguments.config_dir, check=check)
        if arguments.show_config:
            sys.stdout.write(redact_yaml(to_yaml(loaded.config)))
            return OK
        _print_notes(loaded)
        try:
            # Called from here, not from a helper: few frames lie between the command and the training loop.
            result = make_job(loaded.config).run()
        except ConfigError as error:  # files, folders or a cluster do not match the config
            found = [with_origin(problem, loaded.composed) for problem in error.problems]
            raise ConfigError(found, after_start=error.after_start) from error
        report(loaded.config, result)
        return OK
    except ConfigError as error:
        sys.stderr.write(format_errors("rlscale-train", error))
        return WRONG_INPUT
    except DataError as error:
        sys.stderr.write(f"rlscale-train: {error}\n")
        return WRONG_INPUT
    except RUN_FAILURES as error:
        sys.stderr.write(_failure_text(error))
        return FAILED
    except OSError as error:
        return _report_os_error(error)
    except KeyboardInterrupt:
        sys.stderr.write("rlscale-train: interrupted\n")
        return INTERRUPTED


def _report_os_error(error: OSError) -> int:
    """Prints what the user can cure, and returns the exit code; raises other errors again."""
    if (problem := long_path_problem(error)) is not None:
        sys.stderr.write(format_errors("rlscale-train", ConfigError([problem])))
        return WRONG_INPUT
    if advice := full_disk_advice(error):
        sys.stderr.write(f"rlscale-train: the run failed: {error}{advice}\n")
        return FAILED
    raise error


def format_errors(command: str, error: ConfigError) -> str:
    """A heading and one line for each problem, as every command prints them."""
    number = len(error.problems)
    heading = "1 error" if number == 1 else f"{number} errors"
    lines = "".join(f"  {problem}\n" for problem in error.problems)
    state = "found after the start of Ray" if error.after_start else "nothing was started"
    return f"{command}: {heading}, {state}\n{lines}"


def usage(groups: Mapping[str, Sequence[str]]) -> str:
    """The text of `--help`, with all options and the number of keys per group."""
    column = max(map(len, groups)) + 2
    options = "\n".join(
        textwrap.fill(
            ", ".join(names),
            width=100,
            initial_indent=f"  {group:<{column}}",
            subsequent_indent=" " * (column + 2),
        )
        for group, names in groups.items()
    )
    num_keys: dict[str, int] = {}
    for key in keys().values():
        if key.group:
            num_keys[key.group] = num_keys.get(key.group, 0) + 1
    # Break lines between the entries "group number" only.
    entries = [f"{group} {number}".replace(" ", "\0") for group, number in num_keys.items()]
    counts = textwrap.fill(", ".join(entries), width=100, initial_indent="  ", subsequent_indent="  ")
    return _USAGE.format(groups=options, keys=counts.replace("\0", " "))


def _print_information(arguments: CommandArguments) -> bool:
    """Handles the flags that print something and need no config; returns whether there was one."""
    if arguments.help:
        sys.stdout.write(usage(ConfigFolders.find(arguments.config_dir).groups()))
    elif arguments.completion is not None:
        # Imported here, like the modules of a sweep: the import takes a tenth of a second.
        from rlscale.config.hydra.completion import run_completion

        run_completion(arguments.completion, ConfigFolders.find(arguments.config_dir))
    elif arguments.version:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
    else:
        return False
    return True


def _failure_text(error: BaseException) -> str:
    """One line with the cause; for a function of the user also the traceback of its code."""
    text = f"rlscale-train: the run failed: {error}\n"
    if isinstance(error, RewardError | HookError) and error.__cause__ is not None:
        text += "".join(traceback.format_exception(error.__cause__))
    return text


def _override_problems(arguments: CommandArguments, check_job: CheckConfig) -> tuple[Problem, ...]:
    """Problems of the overrides, to be reported with those of the flags."""
    try:
        load_config_with_notes(arguments.overrides, config_dir=arguments.config_dir, check=check_job)
    except ConfigError as error:
        # The overrides of a sweep may have several values.
        return tuple(each for each in error.problems if not (arguments.multirun and each.rule == SINGLE_VALUE_RULE))
    return ()


def _print_notes(loaded: LoadedConfig) -> None:
    """Prints replaced values and warnings."""
    replaced = (f"{derived} (was {show(derived.was)})" for derived in loaded.derived if derived.is_notable)
    sys.stderr.writelines(f"note: {line}\n" for line in replaced)
    sys.stderr.writelines(f"warning: {line}\n" for line in loaded.warnings)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRunner:
    """Runs sweeps for `rlscale-train -m` and `rlscale-sweep`, and prints their results."""

    make_job: MakeJob
    check_job: CheckConfig
    share_ray: ShareRay | None

    def run(self, overrides: Sequence[str], *, config_dir: Path | None, resume: bool = False) -> int:
        """Runs all jobs, or those without a result. Returns the exit code: 1 when a job failed."""
        from rlscale.config.hydra.sweep import run_sweep

        result = run_sweep(
            overrides,
            run_loaded=self._run_job,
            config_dir=config_dir,
            check_config=self.check_job,
            share_ray=self.share_ray,
            resume=resume,
        )
        print_sweep(result)
        if result.interrupted:
            raise KeyboardInterrupt
        return FAILED if any(job.error for job in result.jobs) else OK

    def _run_job(self, index: int, loaded: LoadedConfig) -> float | None:
        sys.stderr.write(f"\njob {index + 1}: {' '.join(loaded.overrides)}\n")
        _print_notes(loaded)
        try:
            return self.make_job(loaded.config).run().objective
        except (ConfigError, DataError) as error:
            sys.stderr.write(f"job {index + 1} failed: {error}\n")
            raise
        except RUN_FAILURES as error:
            sys.stderr.write(f"job {index + 1}: {_failure_text(error)}")
            raise
        except Exception:
            sys.stderr.write(f"job {index + 1} failed:\n{traceback.format_exc()}")
            raise


def print_sweep(result: SweepResult) -> None:
    """Writes the files of a sweep's results and prints its table."""
    from rich.console import Console

    from rlscale.observe.sweep_results import closing_lines, make_table, write_sweep

    files = write_sweep(result)
    Console().print(make_table(result))
    sys.stdout.writelines(f"{line}\n" for line in closing_lines(result, files))
