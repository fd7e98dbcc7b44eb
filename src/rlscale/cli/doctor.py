"""The command `rlscale-doctor`: checks a machine before the first run on it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlscale.checkpoint.run_folder import unwritable
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.doctor.catalog import select_checks
from rlscale.doctor.check_result import BAD
from rlscale.doctor.run_checks import CheckOutcome, run_checks
from rlscale.doctor.write_report import DoctorReport, to_json, write_report

PASSED, FAILED, WRONG_INPUT = 0, 1, 2

MAX_SCALE = 100.0
"""Largest factor of the deadlines: with it all checks together have 15 hours."""


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-doctor",
        description="Checks a machine: driver, torch, NCCL, training steps, engines, weight channels, speed, and at "
        "last Ray and a short run. Each check is a process with a deadline; none stops the next. Needs no network.",
        epilog="exit code: 0 no check failed, 1 a check failed, 2 the arguments are wrong",
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="CHECK", help="run only these checks")
    add("--skip", nargs="+", default=[], metavar="CHECK", help="run all but these checks")
    add("--list", action="store_true", help="print the checks and their deadlines, and run none")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is a driver")
    add("--deadline-scale", type=float, default=1.0, help="factor for all deadlines, for a slow machine; default: 1")
    add("--out", type=Path, default=Path("runs/doctor"), help="folder of the report; default: runs/doctor")
    add("--note", default="", help="a sentence for the report, e.g. on what else runs on the machine")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and writes the report. Returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        checks = select_checks(args.only, args.skip)
        if not 0 < args.deadline_scale <= MAX_SCALE:
            rule = f"be above 0 and at most {MAX_SCALE:g}"
            raise ValueError(f"--deadline-scale must {rule}, got {args.deadline_scale:g}; remove it to use 1")
        if problem := unwritable("--out", args.out):
            raise ValueError(problem)
    except ValueError as error:
        sys.stderr.write(f"rlscale-doctor: {error}\n")
        return WRONG_INPUT
    if args.list:
        for check in checks:
            _print(f"{check.name:<14} {check.deadline_s * args.deadline_scale:>4.0f} s  {check.title}")
        return PASSED
    device = find_device() if args.device == "auto" else args.device
    load, outcomes = os.getloadavg()[0], []
    try:
        for outcome in run_checks(checks, device=device, deadline_scale=args.deadline_scale):
            outcomes.append(outcome)
            _print_outcome(outcome)
    except KeyboardInterrupt:
        _print("interrupted; the report contains the checks so far")
    report = DoctorReport(device=device, outcomes=tuple(outcomes), load=load, note=args.note)
    _summarize(report, write_report(report, args.out))
    return FAILED if len(outcomes) < len(checks) else report.exit_code


def find_device() -> str:
    """`cuda` where there is an NVIDIA driver, even if torch cannot use it: that is for the check of torch to report."""
    has_driver = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    return "cuda" if has_driver else "cpu"


def _print_outcome(outcome: CheckOutcome) -> None:
    result = outcome.result
    verdict = str(result.verdict).replace("_", " ")
    _print(f"{outcome.check.name:<14} {verdict:<9} {outcome.seconds:>5.1f} s  {result.summary}")
    if result.verdict in BAD:
        for line in outcome.output[-5:]:
            _print(f"{'':<15}| {line}")
    if result.next_step:
        _print(f"{'':<15}next: {result.next_step}")


def _summarize(report: DoctorReport, path: Path) -> None:
    content = to_json(report)
    counts = ", ".join(f"{number} {verdict.replace('_', ' ')}" for verdict, number in content["counts"].items())
    seconds = sum(outcome.seconds for outcome in report.outcomes)
    _print(f"{counts or 'no check ran'} in {seconds:.0f} s on {report.device}; report: {path}")


def _print(line: str) -> None:
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()  # a line appears when its check has finished, also in a pipe
    except BrokenPipeError:
        # The reader has ended, e.g. `head`: the checks continue, and the report is written.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
