"""Translates configurations of other projects: `rlscale.migrate`."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.load import LoadedConfig, load_config_with_notes
from rlscale.errors import ConfigError, Problem
from rlscale.migration.config_files import SUFFIXES, read_config_file
from rlscale.migration.environment_notes import environment_findings, variable_findings
from rlscale.migration.experiment_file import choose_options, write_experiment
from rlscale.migration.findings import Finding, Kind
from rlscale.migration.foreign_arguments import Project, Reading
from rlscale.migration.from_slime import translate_slime
from rlscale.migration.from_trl import translate_trl
from rlscale.migration.from_verl import translate_verl
from rlscale.migration.launch_commands import find_launch, read_command_line
from rlscale.migration.migration_report import Migration
from rlscale.migration.named_configs import read_named_configs
from rlscale.migration.python_launcher import read_launcher
from rlscale.migration.shell_script import read_script
from rlscale.migration.translation_draft import TranslationDraft

TRANSLATORS: Mapping[Project, Callable[[TranslationDraft], None]] = {
    Project.slime: translate_slime,
    Project.verl: translate_verl,
    Project.trl: translate_trl,
}


def migrate(
    source: str | Path | Sequence[str],
    *,
    set: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Migration:
    """Translates a run of slime, verl or TRL to an experiment of rlscale. Runs nothing.

    Args:
        source: a launch script (`.sh`), a Python launcher (`.py`), a YAML or JSON file, or the words of a command line.
        set: values of variables that the script reads, e.g. `{"NUM_GPUS": "8"}`; the script cannot change them.
        name: name of the experiment. None: made from the name of the file.

    Returns: the experiment file, the report, and what became of each argument.

    Raises: ConfigError when the input cannot be read or starts no run of a known project.
    """
    found = translate_input(source, set=set, name=name)
    return replace(found, problems=load_problems(found.yaml, found.name))


def translate_input(
    source: str | Path | Sequence[str], *, set: Mapping[str, str] | None = None, name: str | None = None
) -> Migration:
    """As `migrate`, without the check whether the experiment loads."""
    reading = _read(source, dict(set or {}), name)
    reading.given = dict(set or {})
    read_named_configs(reading, _file_of(source), reading.given)
    draft = TranslationDraft(reading=reading)
    TRANSLATORS[reading.project](draft)
    missing = [argument.name for argument in reading.arguments if argument.index not in draft.places]
    assert not missing, f"every argument must have a place, got none for {missing}"
    choose_options(draft)
    shown = str(source) if isinstance(source, str | Path) else "the command line"
    launcher = f" ({reading.launcher})" if reading.launcher else ""
    heading = f"Translated from {Path(shown).name}, a run of {reading.project}{launcher}, by rlscale-migrate."
    text = write_experiment(draft, heading)
    notes = [Finding(kind=Kind.wrong, subject=note, text="", source=place) for place, note in reading.notes]
    notes += [*draft.findings, *variable_findings(reading, text), *environment_findings(reading)]
    return Migration(
        name=reading.name,
        project=reading.project,
        source=shown,
        yaml=text,
        arguments=tuple(reading.arguments),
        places=draft.places,
        notes=tuple(notes),
    )


def load_problems(text: str, name: str) -> tuple[Problem, ...]:
    """The problems of an experiment file when it is loaded; empty when it loads."""
    try:
        load_experiment(text, name)
    except ConfigError as error:
        return error.problems
    return ()


def load_experiment(text: str, name: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Loads the text of an experiment file. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment" / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        try:
            return load_config_with_notes([f"experiment={name}", *overrides], config_dir=Path(folder), to_run=False)
        except ConfigError as error:
            # The folder is gone when the message is read; the experiment is written elsewhere.
            raise ConfigError(
                [_without_folder(problem, f"{folder}/experiment/") for problem in error.problems]
            ) from None


def _without_folder(problem: Problem, folder: str) -> Problem:
    return replace(problem, origin=problem.origin.replace(folder, ""))


def _read(source: str | Path | Sequence[str], given: Mapping[str, str], name: str | None) -> Reading:
    if not isinstance(source, str | Path):
        return _found(read_command_line(list(source), name or "migrated"), "the command line")
    path = Path(os.path.expanduser(source))
    try:
        path.resolve()
    except (OSError, RuntimeError) as error:
        problem = Problem(path="input", rule="be readable", value=str(path), fix=" ".join(str(error).split()))
        raise ConfigError([problem]) from error
    if not path.exists() and isinstance(source, str) and (" " in source or "=" in source):
        return _read_text(source, name)
    reading = _found(_read_file(path, given, name or experiment_name(path)), str(source))
    return reading


def _file_of(source: str | Path | Sequence[str]) -> Path | None:
    """The file of an input. None: it is a command line."""
    return Path(source) if isinstance(source, str | Path) and Path(source).is_file() else None


def _read_text(text: str, name: str | None) -> Reading:
    try:
        words = shlex.split(text)
    except ValueError as error:
        problem = Problem(path="input", rule="have closed quotes", value=text, fix=str(error))
        raise ConfigError([problem]) from error
    return _found(read_command_line(words, name or "migrated"), "the command line")


def _read_file(path: Path, given: Mapping[str, str], name: str) -> Reading | None:
    if path.is_dir():
        fix = "name a script, a launcher, or a YAML or JSON file"
        raise ConfigError([Problem(path="input", rule="be a file", value=str(path), fix=fix)])
    if path.exists() and not path.is_file():
        # A pipe may never end, and what a script sources is searched next to it.
        fix = "write it to a file, and name that"
        raise ConfigError([Problem(path="input", rule="be a file", value=f"{path}, a pipe or a device", fix=fix)])
    if path.suffix in SUFFIXES:
        return read_config_file(path.resolve(), given=given, name=name)
    if path.suffix == ".py":
        return read_launcher(path.resolve(), given=given, name=name)
    return find_launch(read_script(path.resolve(), given=given), name)


def _found(reading: Reading | None, shown: str) -> Reading:
    if reading is not None:
        return reading
    rule = "start a run of slime, verl or TRL"
    fix = "name the script that calls train.py, main_ppo or GRPOTrainer, or give its command line"
    raise ConfigError([Problem(path="input", rule=rule, value=shown, fix=fix)])


def experiment_name(path: Path) -> str:
    """The name of the experiment of a file: `run-qwen3-4B.sh` -> `qwen3_4b`."""
    stem = re.sub(r"[^a-z0-9]+", "_", path.stem.lower()).strip("_").removeprefix("run_") or "run"
    # A folder of options may not have an experiment of the same name as rlscale.
    taken = ConfigFolders.find().groups()["experiment"]
    return f"{stem}_migrated" if stem in taken else stem
