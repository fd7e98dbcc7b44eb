"""The command `rlscale-migrate`: translates a run of slime, verl or TRL to an experiment, and runs nothing."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import rlscale
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.config import Device
from rlscale.errors import ConfigError, Problem
from rlscale.migration.migrate import load_experiment, migrate
from rlscale.migration.migration_report import Migration, as_json
from rlscale.plan import find_hardware, find_suggestions, make_plan
from rlscale.plan.tables import print_plan

COMPLETE, WITH_LOSSES, UNREADABLE = 0, 1, 2
HARDWARE = "h100"
WIDTH = 120  # where the output is no terminal
_NAME = re.compile(r"\w[\w.-]*")

_EPILOG = """\
examples:
  rlscale-migrate scripts/run-qwen3-4B.sh
  rlscale-migrate scripts/run-qwen3-4B.sh --set NUM_GPUS=8 --output my_configs
  rlscale-migrate -- --hf-checkpoint Qwen/Qwen3-4B --rollout-batch-size 32 --lr 1e-6
  rlscale-train --config-dir my_configs experiment=qwen3_4b

exit code: 0 complete, 1 written with losses or does not load yet, 2 the input cannot be read; with --strict nothing is
written in the case of 1
"""


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-migrate",
        usage="rlscale-migrate [flags] FILE | rlscale-migrate [flags] -- ARGUMENT ...",
        description="Translates a run of slime, verl or TRL to an experiment of rlscale: a launch script (.sh), a "
        "Python launcher (.py), a YAML or JSON file, or a bare command line behind --. Writes "
        "experiment/<name>.yaml and a report with one line for each argument that is not a plain rename, and prints "
        "the report and the plan. It reads scripts and runs nothing of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlscale {rlscale.__version__}")
    add = parser.add_argument
    add("source", nargs="*", help="a file, or the words of a command line")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="value of a variable that the script reads")
    add("--name", help="name of the experiment; default: made from the name of the file")
    add("--output", type=Path, default=Path(), metavar="DIR", help="folder for experiment/<name>.yaml; default: here")
    add("--json", action="store_true", help="print JSON: the experiment, each argument with what became of it")
    add("--strict", action="store_true", help="write nothing when anything is lost")
    add("--dry-run", action="store_true", help="write nothing")
    add("--no-plan", action="store_true", help="print no plan of the run")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Words behind `--` are arguments of the other project, which argparse must not read.
    end = words.index("--") if "--" in words else len(words)
    arguments = make_parser().parse_args(words[:end])
    try:
        return _run(arguments, words[end + 1 :])
    except ConfigError as error:
        sys.stderr.writelines(f"rlscale-migrate: {problem}\n" for problem in error.problems)
        return UNREADABLE


def _run(arguments: argparse.Namespace, words: list[str]) -> int:
    given = _settings(arguments.set)
    if arguments.name is not None and not _NAME.fullmatch(arguments.name):
        rule, fix = "be one word of letters, digits, - and _", "write e.g. --name qwen3_4b"
        raise ConfigError([Problem(path="--name", rule=rule, value=arguments.name or '""', fix=fix)])
    found = migrate(_source(arguments.source, words), set=given, name=arguments.name)
    if not (arguments.dry_run or (arguments.strict and not found.is_complete)):
        try:
            # A shell expands no `~` behind the sign in --output=~/mine.
            file = found.write(Path(os.path.expanduser(arguments.output)))
        except OSError as error:
            fix = error.strerror or str(error)
            problem = Problem(path="--output", rule="be a folder to write to", value=str(arguments.output), fix=fix)
            raise ConfigError([problem]) from error
        if not arguments.json:
            sys.stdout.write(f"wrote {file}\n\n")
    if arguments.json:
        sys.stdout.write(as_json(found))
    else:
        sys.stdout.write(found.report())
        if not arguments.no_plan and not found.problems:
            _print_plan(found)
    return COMPLETE if found.is_complete else WITH_LOSSES


def _source(files: list[str], words: list[str]) -> str | list[str]:
    if words and not files:
        return words
    if len(files) == 1 and not words:
        return files[0]
    value = " ".join([*files, *words]) or "nothing"
    fix = "name a script, or write -- and a command line"
    raise ConfigError([Problem(path="input", rule="be one file or a command line behind --", value=value, fix=fix)])


def _settings(given: list[str]) -> dict[str, str]:
    """The variables of `--set`."""
    wrong = [text for text in given if not text.partition("=")[1] or not text.partition("=")[0].isidentifier()]
    if wrong:
        fix = "write e.g. --set NUM_GPUS=8"
        raise ConfigError([Problem(path="--set", rule="be NAME=VALUE", value=text, fix=fix) for text in wrong])
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def _print_plan(found: Migration) -> None:
    loaded = load_experiment(found.yaml, found.name, [f"cluster.device={Device.cuda}"])
    hardware = find_hardware(HARDWARE)
    try:
        plan = make_plan(loaded.config, hardware)
    except ConfigError as error:
        # The architecture of a checkpoint that is not on this machine is not known.
        sys.stdout.write("\nNo plan\n" + "".join(f"  {problem}\n" for problem in error.problems))
        return
    suggestions = find_suggestions(loaded.config, plan, lambda config: make_plan(config, hardware))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH, soft_wrap=False)
    console.print()
    print_plan(plan, suggestions, console)


if __name__ == "__main__":
    sys.exit(main())
