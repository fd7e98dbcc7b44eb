"""The flags of a command that composes a config; all other arguments are overrides of the config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlscale.config.problems import nearest
from rlscale.errors import Problem

FLAGS = ("--help", "--version", "--multirun", "--cfg", "--shell-completion", "--config-dir")
WITH_VALUE = ("--cfg", "--shell-completion", "--config-dir")


@dataclass(kw_only=True, slots=True)
class CommandArguments:
    """A command line, split into flags and overrides."""

    help: bool = False
    version: bool = False
    show_config: bool = False
    multirun: bool = False
    completion: str | None = None  # the value of -sc
    config_dir: Path | None = None
    overrides: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_arguments(argv: Sequence[str]) -> CommandArguments:
    """Parses the flags. An unknown flag stays among the overrides, whose check suggests the key it may mean."""
    arguments = CommandArguments()
    # argparse would exit at the first problem; all problems are to be reported together with those of the overrides.
    remaining = [part for argument in argv for part in _split(argument)]
    while remaining:
        argument = remaining.pop(0)
        match argument:
            case "-h" | "--help":
                arguments.help = True
            case "--version":
                arguments.version = True
            case "-m" | "--multirun":
                arguments.multirun = True
            case "-c" | "--cfg":
                arguments.show_config = True
                _expect_job(arguments, remaining.pop(0) if remaining else "nothing")
            case "-sc" | "--shell-completion":
                arguments.completion = remaining.pop(0) if remaining else ""
            case "--config-dir" if remaining:
                # A shell expands no `~` behind the sign in --config-dir=~/mine.
                arguments.config_dir = Path(os.path.expanduser(remaining.pop(0)))
            case _ if flag := _nearest_flag(argument):
                fix = f"did you mean {flag}?" if flag != argument else f"write {flag} <value>"
                rule = "be a known flag" if flag != argument else "have a value"
                arguments.problems.append(Problem(path=argument, rule=rule, value=argument, fix=fix))
                if flag in WITH_VALUE and remaining and _is_value(remaining[0]):
                    remaining.pop(0)
            case _ if argument.startswith("--") and "=" not in argument and remaining and _is_value(remaining[0]):
                # `--lr 3e-5`: keep the value with its flag, and those of a list.
                values = [remaining.pop(0)]
                while remaining and _is_value(remaining[0]) and not remaining[0].startswith("-"):
                    values.append(remaining.pop(0))
                arguments.overrides.append(f"{argument}={' '.join(values)}")
            case _:
                arguments.overrides.append(argument)
    if arguments.show_config and arguments.multirun:
        fix = "show one job's config at a time"
        arguments.problems.append(Problem(path="--cfg", rule="be used without -m", value="-m", fix=fix))
    return arguments


def _split(argument: str) -> list[str]:
    """`--cfg=job` as two arguments, also when the flag is misspelt."""
    flag, equals, value = argument.partition("=")
    return [flag, value] if equals and (flag in WITH_VALUE or _nearest_flag(flag) in WITH_VALUE) else [argument]


def _expect_job(arguments: CommandArguments, value: str) -> None:
    if value != "job":
        arguments.problems.append(Problem(path="--cfg", rule="be job", value=value, fix="write --cfg job"))


def _nearest_flag(argument: str) -> str | None:
    """The flag with at most one edit from an argument; a key written as a flag is further away."""
    return nearest(argument, FLAGS, limit=1) if argument.startswith("--") else None


def _is_value(argument: str) -> bool:
    return "=" not in argument and not argument.startswith("--")
