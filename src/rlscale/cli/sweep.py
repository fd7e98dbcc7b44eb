"""The command `rlscale-sweep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import rlscale
from rlscale.cli.app import INTERRUPTED, OK, WRONG_INPUT, SweepRunner, format_errors, print_sweep
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.cli.train import check_run, make_trainer, share_ray_of_jobs
from rlscale.control.left_calls import exit_process
from rlscale.errors import ConfigError, count_noun


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-sweep",
        description="Prints the table of a sweep again and writes its files; with --resume, runs failed jobs again.",
        epilog="Works during a sweep, too: jobs have a row when they end.",
    )
    add = parser.add_argument
    add("folder", type=Path, help="folder of the sweep, as rlscale-train -m prints it")
    add(
        "--resume",
        action="store_true",
        help="run the jobs that failed or have no result; each continues in its run folder",
    )
    add("--version", action="version", version=f"rlscale {rlscale.__version__}")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None, *, runner: SweepRunner | None = None) -> int:
    """Prints the sweep. Returns 0; 1 when a resumed job failed, 2 when there is no sweep in the folder."""
    arguments = make_parser().parse_args(argv)
    try:
        return _resume(arguments.folder, runner) if arguments.resume else _show(arguments.folder)
    except ConfigError as error:
        sys.stderr.write(format_errors("rlscale-sweep", error))
        return WRONG_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("rlscale-sweep: interrupted\n")
        return INTERRUPTED


def _show(folder: Path) -> int:
    from rlscale.config.hydra.sweep import SweepCommand, read_sweep

    result = read_sweep(folder)
    print_sweep(result)
    for file in result.unreadable:
        fix = "delete it; --resume runs the job again"
        sys.stderr.write(f"rlscale-sweep: {file} must be the record of a job, got something else; {fix}\n")
    if missing := len(set(SweepCommand.read(folder).jobs) - {job.overrides for job in result.jobs}):
        sys.stdout.write(f"{count_noun(missing, 'job')} without a result; --resume runs what failed or is missing\n")
    return OK


def _resume(folder: Path, runner: SweepRunner | None) -> int:
    from rlscale.config.hydra.sweep import SweepCommand, read_sweep

    command = SweepCommand.read(folder)
    succeeded = {job.overrides for job in read_sweep(folder).jobs if job.error is None}
    runner = runner or SweepRunner(make_job=make_trainer, check_job=check_run, share_ray=share_ray_of_jobs)
    # The folder may have been moved, so it is given by its path of today.
    overrides = [each for each in command.overrides if not each.startswith("hydra.sweep.dir=")]
    overrides.append(f'hydra.sweep.dir="{folder}"')
    config_dir = None if command.config_dir is None else Path(command.config_dir)
    code = runner.run(overrides, config_dir=config_dir, resume=True)
    # A search that chooses the values has no list of jobs.
    if code == OK and command.jobs and set(command.jobs) <= succeeded:
        sys.stdout.write(f"{count_noun(len(succeeded), 'job')} with a result, none to resume\n")
    return code


if __name__ == "__main__":
    exit_process(main())
