"""Reads a Python launcher without importing or running it: follows its assignments to the call that starts a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from rlscale.errors import ConfigError, Problem
from rlscale.migration.foreign_arguments import Argument, Project, Reading, split_flags
from rlscale.migration.launch_commands import find_launch
from rlscale.migration.python_objects import as_text, is_text
from rlscale.migration.python_values import PythonReader
from rlscale.migration.shell_record import ScriptRecord
from rlscale.migration.shell_script import ShellReader
from rlscale.migration.shell_values import Piece, Source, Text, Variables, literal, split_words, unquoted, value_of

LAUNCH = "execute_train"
CONFIGS = ("GRPOConfig", "AsyncGRPOConfig")
TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer")


def read_launcher(path: Path, *, given: Mapping[str, str], name: str) -> Reading | None:
    """The run that a launcher starts. None: it starts none.

    Raises ConfigError when the file is no Python.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text)
    except OSError as error:
        fix = error.strerror or str(error)
        raise ConfigError([Problem(path="input", rule="be readable", value=str(path), fix=fix)]) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = Problem(path="input", rule="be valid Python", value=str(path), fix=str(error))
        raise ConfigError([problem]) from error
    record = ScriptRecord(variables=Variables(given=dict(given)))
    reader = PythonReader(record, file=str(path), lines=text.splitlines(), watched=(LAUNCH, *CONFIGS, *TRAINERS))
    reader.follow(tree)
    calls = {call: [each for name_, each in reader.calls if name_ == call] for call in (LAUNCH, *CONFIGS, *TRAINERS)}
    if calls[LAUNCH]:
        return _slime(calls[LAUNCH][-1], record, path, name)
    config = next((calls[each][-1] for each in CONFIGS if calls[each]), None)
    if config is None:
        return find_launch(record, name)
    trainer = next((calls[each][-1] for each in TRAINERS if calls[each]), {})
    return _trl(config, trainer, record, path, name)


def _slime(call: Mapping[str, object], record: ScriptRecord, path: Path, name: str) -> Reading:
    """The arguments of `execute_train(train_args=..., megatron_model_type=...)`."""
    words: list[Text] = []
    model = call.get("megatron_model_type")
    if is_text(model):
        words += _model_words(value_of(as_text(model)), record, path)
    given = call.get("train_args")
    words += _shell_words(as_text(given)) if given is not None else []
    program = call.get("train_script")
    reading = Reading(project=Project.slime, name=name, arguments=list(split_flags(words)))
    reading.launcher = value_of(as_text(program)) if is_text(program) else "train.py"
    reading.launched_at = Source(file=str(path), line=int(str(call.get("", 1))))
    environment = call.get("extra_env_vars")
    if isinstance(environment, dict):
        reading.environment = {str(key): as_text(value) for key, value in environment.items() if is_text(value)}
    reading.notes, reading.uses = record.notes, record.variables.uses
    return reading


def _model_words(model: str, record: ScriptRecord, path: Path) -> list[Text]:
    """The words of `MODEL_ARGS` in `scripts/models/<model>.sh`, which the launcher sources."""
    for folder in path.parents:
        file = folder / "scripts" / "models" / f"{model}.sh"
        if file.is_file():
            reader = ShellReader(record, folder=file.parent, positional=[])
            reader.run_file(file)
            return record.variables.elements("MODEL_ARGS", Source(file=str(file), line=1))
    source = Source(file=str(path), line=1)
    record.note(source, f"uses scripts/models/{model}.sh, which does not exist here")
    return []


def _shell_words(text: Text) -> list[Text]:
    """The words that a shell makes of the text of `train_args`: quotes protect blanks and are removed."""
    protected: list[Piece] = []
    quote = ""
    for piece in text:
        if piece.template != piece.value:
            protected.append(piece if not quote else unquoted((piece,))[0])
            continue
        for part in re.split(r"(['\"])", piece.value):
            if part in ("'", '"') and quote in ("", part):
                quote = "" if quote else part
            elif part:
                protected.append(literal(part, piece.source, quoted=bool(quote)))
    return split_words(protected)


def _trl(
    config: Mapping[str, object], trainer: Mapping[str, object], record: ScriptRecord, path: Path, name: str
) -> Reading:
    """The arguments of `GRPOConfig(...)` and those of the trainer that are values."""
    reading = Reading(project=Project.trl, name=name, launcher="GRPOTrainer")
    for call, prefix in ((config, ""), (trainer, "trainer.")):
        line = int(str(call.get("", 1)))
        for key, value in call.items():
            # `args=` is the config, and "" is the line of the call.
            if key in ("", "args"):
                continue
            source = Source(file=str(path), line=int(str(call.get(f"line {key}", line))))
            if key.startswith("line "):
                continue
            reading.arguments.append(
                Argument(
                    name=f"{prefix}{key}", values=_values(value, source), source=source, index=len(reading.arguments)
                )
            )
    reading.launched_at = Source(file=str(path), line=int(str(config.get("", 1))))
    reading.notes, reading.uses = record.notes, record.variables.uses
    return reading


def _values(value: object, source: Source) -> tuple[Text, ...]:
    if isinstance(value, list) and not is_text(value):
        return tuple(as_text(each, source) for each in value)
    return (as_text(value, source),)
