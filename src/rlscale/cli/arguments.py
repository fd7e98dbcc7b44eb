"""The flags of a command that composes a config; everything else on its line is for the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlscale.config.errors import nearest
from rlscale.errors import Problem

FLAGS = ("--help", "--version", "--multirun", "--cfg", "--shell-completion", "--config-dir")
WITH_VALUE = ("--cfg", "--shell-completion", "--config-dir")


@dataclass(kw_only=True, slots=True)
class Arguments:
    """A command line, its flags apart from its overrides."""

    help: bool = False
    version: bool = False
    show_config: bool = False
    multirun: bool = False
    completion: str | None = None  # what -sc asks for
    config_dir: Path | None = None
    overrides: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Reads the flags; a flag that is not known stays among the overrides, where it is told what key it might mean."""
    arguments = Arguments()
    words = [part for word in argv for part in _split(word)]
    while words:
        word = words.pop(0)
        match word:
            case "-h" | "--help":
                arguments.help = True
            case "--version":
                arguments.version = True
            case "-m" | "--multirun":
                arguments.multirun = True
            case "-c" | "--cfg":
                arguments.show_config = True
                _expect_job(arguments, words.pop(0) if words else "nothing")
            case "-sc" | "--shell-completion":
                arguments.completion = words.pop(0) if words else ""
            case "--config-dir" if words:
                arguments.config_dir = Path(words.pop(0))
            case _ if flag := _meant_flag(word):
                fix = f"did you mean {flag}?" if flag != word else f"write {flag} <value>"
                rule = "be a known flag" if flag != word else "have a value"
                arguments.problems.append(Problem(path=word, rule=rule, value=word, fix=fix))
                if flag in WITH_VALUE and words and _is_value(words[0]):
                    words.pop(0)
            case _ if word.startswith("--") and "=" not in word and words and _is_value(words[0]):
                arguments.overrides.append(f"{word}={words.pop(0)}")
            case _:
                arguments.overrides.append(word)
    if arguments.show_config and arguments.multirun:
        fix = "show one job's config at a time"
        arguments.problems.append(Problem(path="--cfg", rule="be used without -m", value="-m", fix=fix))
    return arguments


def _split(word: str) -> list[str]:
    """`--cfg=job` as two words, misspelt or not."""
    flag, equals, value = word.partition("=")
    return [flag, value] if equals and (flag in WITH_VALUE or _meant_flag(flag) in WITH_VALUE) else [word]


def _expect_job(arguments: Arguments, what: str) -> None:
    if what != "job":
        arguments.problems.append(Problem(path="--cfg", rule="be job", value=what, fix="write --cfg job"))


def _meant_flag(word: str) -> str | None:
    """The flag that a word is, or is one letter away from; names of keys written as flags are left alone."""
    return nearest(word, FLAGS, limit=1) if word.startswith("--") else None


def _is_value(word: str) -> bool:
    return "=" not in word and not word.startswith("--")
