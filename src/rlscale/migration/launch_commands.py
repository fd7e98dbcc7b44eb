"""The command of a script that starts a training run, among all commands of the script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from rlscale.migration.argument_tables import read_table
from rlscale.migration.foreign_arguments import Argument, Project, Reading, is_flag, read_environment, split_flags
from rlscale.migration.shell_record import Command, ScriptRecord
from rlscale.migration.shell_values import Source, Text, literal, split_words, value_of

SLIME_PROGRAMS = ("train.py", "train_async.py", "train_multi_turn.py")
_VERL_MODULE = re.compile(r"(?:\w+\.)*(?:verl|recipe)(?:\.\w+)*\.(?:main_(?!gen|eval)\w+|\w*sft_trainer\w*)")
TRL_PROGRAMS = ("grpo.py", "gspo.py", "grpo_vlm.py", "gspo_vlm.py", "grpo_agent.py")
HYDRA_FLAGS = ("--config-name", "--config-path", "--config-dir", "--cfg", "--resolve", "--multirun")
_FIRST_MARK = 0xE000
_QUOTED_COMMANDS = ("bash", "sh", "ssh", "srun", "mpirun", "su")


def find_launch(record: ScriptRecord, name: str) -> Reading | None:
    """The run that the recorded commands start; the last one when there are several. None: none starts one."""
    found = [reading for command in record.commands if (reading := _read_command(command, name)) is not None]
    if not found:
        return None
    reading = found[-1]
    if len(found) > 1 and reading.launched_at is not None:
        text = f"starts {len(found)} runs; the last one is translated"
        record.note(reading.launched_at, text)
    reading.notes, reading.uses, reading.files = record.notes, record.variables.uses, record.files
    return reading


def read_command_line(words: Sequence[str], name: str) -> Reading | None:
    """The run that a bare command line describes. None: it is of no known project."""
    if not words:
        return None
    source = Source(file="command line", line=1)
    texts: tuple[Text, ...] = tuple((literal(word, source),) for word in words)
    found = _read_command(Command(words=texts, source=source, environment={}), name)
    if found is not None:
        return found
    if _names_of_trl(words):
        return _read_trl(texts, name)
    # Hydra's own flags come before overrides, which have no dashes.
    if any(word.startswith("--") and word.partition("=")[0] not in HYDRA_FLAGS for word in words):
        return Reading(project=Project.slime, name=name, arguments=list(split_flags(texts)), launched_at=source)
    if any("=" in word for word in words):
        return Reading(project=Project.verl, name=name, arguments=read_overrides(texts), launched_at=source)
    return None


def _names_of_trl(words: Sequence[str]) -> bool:
    """Whether a command line has arguments of TRL, `--num_generations 8`, and none that only slime has."""
    names = [word.partition("=")[0] for word in words]
    is_trl = [name.lstrip("-") in read_table(Project.trl) and "_" in name for name in names]
    return any(is_trl) and not any(name in read_table(Project.slime) for name in names if "-" in name.strip("-"))


def _read_trl(words: Sequence[Text], name: str) -> Reading:
    """The arguments of a script that parses GRPOConfig from its command line, or those of a call, `beta=0.04`."""
    if not any(is_flag(value_of(word)) for word in words):
        return Reading(project=Project.trl, name=name, arguments=read_overrides(words))
    arguments = [replace(argument, name=argument.name.lstrip("-")) for argument in split_flags(words)]
    return Reading(project=Project.trl, name=name, arguments=arguments)


def _launched_gpus(before: Sequence[str]) -> tuple[int, int] | None:
    """Nodes, and processes of a node, that accelerate or torchrun starts; None when the command has no number."""
    found: dict[str, str] = {}
    for word, following in zip(before, [*before, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        found[name] = value if equals else following
    nodes = _number(found, "num_machines") or _number(found, "nnodes") or 1
    # accelerate counts the processes of all nodes, torchrun those of one.
    if whole := _number(found, "num_processes"):
        return nodes, max(1, whole // nodes)
    each = _number(found, "nproc_per_node")
    return (nodes, each) if each else None


def _number(found: Mapping[str, str], name: str) -> int:
    return int(found[name]) if found.get(name, "").isdigit() else 0


def read_overrides(words: Sequence[Text]) -> list[Argument]:
    """Overrides of Hydra: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`, and Hydra's own flags."""
    arguments: list[Argument] = []
    flags = list(words)
    while flags:
        word = flags.pop(0)
        text = value_of(word)
        if not text:
            continue
        name, equals, _ = text.partition("=")
        values: tuple[Text, ...] = (_behind(word, len(name) + 1),) if equals else ()
        # `--resolve` and `--multirun` have no value, and a short flag of Hydra is `-cn`.
        is_named = (name.startswith("--") and name not in ("--resolve", "--multirun")) or name in ("-cn", "-cp", "-cd")
        if is_named and not equals and flags and not value_of(flags[0]).startswith("--"):
            values = (flags.pop(0),)
        arguments.append(Argument(name=name, values=values, source=word[0].source, index=len(arguments)))
    return arguments


def _behind(word: Text, start: int) -> Text:
    """The text from a character on."""
    kept = []
    for piece in word:
        if start >= len(piece.value) and start > 0:
            start -= len(piece.value)
        elif start > 0 and piece.template == piece.value:
            kept.append(literal(piece.value[start:], piece.source))
            start = 0
        else:
            kept.append(piece)
            start = 0
    return tuple(kept)


def _read_command(command: Command, name: str) -> Reading | None:
    words = list(command.words)
    values = [value_of(word) for word in words]
    if PurePosixPath(values[0]).name in _QUOTED_COMMANDS:
        return _read_quoted(command, name)
    for place, value in enumerate(values):
        program = PurePosixPath(value).name
        # `python -m verl.trainer.main_ppo`, or the file of such a module.
        # A file `verl/trainer/main_ppo.py` is the module of the same name.
        module = value.removesuffix(".py").replace("/", ".") if place else ""
        if place and _VERL_MODULE.fullmatch(module):
            reading = Reading(project=Project.verl, name=name, arguments=read_overrides(words[place + 1 :]))
            return _complete(reading, module, words[place], words[:place], command)
        is_trl = program == "trl" and values[place + 1 : place + 2] == ["grpo"]
        if is_trl or (program in TRL_PROGRAMS and place):
            reading = _read_trl(words[place + 1 + is_trl :], name)
            return _complete(reading, program, words[place], words[:place], command)
        if program in SLIME_PROGRAMS and place and _is_script(values[place - 1]):
            reading = Reading(project=Project.slime, name=name, arguments=list(split_flags(words[place + 1 :])))
            return _complete(reading, program, words[place], words[:place], command)
    return None


def _is_script(before: str) -> bool:
    """Whether a word can stand before the name of a Python program."""
    return "python" in before or before.startswith("-") or before in ("--", "torchrun", "uv", "run") or before.isdigit()


def _complete(reading: Reading, program: str, word: Text, before: Sequence[Text], command: Command) -> Reading:
    reading.launcher, reading.launched_at = program, (word[0] if word else command.words[0][0]).source
    reading.environment = dict(command.environment)
    reading.gpus = _launched_gpus([value_of(each) for each in before])
    for place, each in enumerate(before):
        text = value_of(each)
        if text.startswith("--runtime-env-json="):
            reading.environment |= read_environment(_behind(each, len("--runtime-env-json=")))
        elif text == "--runtime-env-json" and place + 1 < len(before):
            reading.environment |= read_environment(before[place + 1])
    return reading


def _read_quoted(command: Command, name: str) -> Reading | None:
    """The run that a command within a text starts: `bash -c "python train.py ..."`."""
    for word in command.words[1:]:
        if any(program in value_of(word) for program in (*SLIME_PROGRAMS, "main_ppo")):
            inner = tuple(split_words([*_unprotected(word)]))
            if len(inner) > 1:
                return _read_command(Command(words=inner, source=command.source, environment=command.environment), name)
    return None


def _unprotected(word: Text) -> Text:
    """The words of a text that a second shell splits."""
    # A variable is one character of the text, from the private use area, so that its value stays an interpolation.
    marks = {chr(_FIRST_MARK + place): piece for place, piece in enumerate(word) if piece.template != piece.value}
    text = "".join(
        chr(_FIRST_MARK + place) if piece in marks.values() else piece.value for place, piece in enumerate(word)
    )
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    source, found = word[0].source, []
    for each in words:
        parts = re.split(f"([{''.join(marks)}])", each) if marks else [each]
        found += [
            replace(marks[part], quoted=True) if part in marks else literal(part, source, quoted=True)
            for part in parts
            if part or len(parts) == 1
        ]
        found.append(literal(" ", source))
    return tuple(found)
