"""Arguments of another project's command, as they are read from its input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlscale.migration.shell_values import Source, Text, VariableUse, is_known, literal, template_of, value_of
from rlscale.secrets import is_secret


class Project(StrEnum):
    """Projects whose configurations can be translated."""

    slime = "slime"
    verl = "verl"
    trl = "trl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument with its values, in the order of the input."""

    name: str  # as in the input: `--lr`, `data.train_batch_size`, `learning_rate`
    values: tuple[Text, ...]
    source: Source
    index: int

    @property
    def plain_name(self) -> str:
        """The name without the signs of Hydra's overrides."""
        return self.name.lstrip("+~")

    @property
    def value(self) -> str:
        """The first value, with the defaults of variables; empty without one."""
        return value_of(self.values[0]) if self.values else ""

    @property
    def is_on(self) -> bool:
        """Whether a flag is given: with a true value, or without one, `--bf16`."""
        return self.value.lower() in ("true", "1", "yes", "")

    @property
    def is_known(self) -> bool:
        return all(is_known(each) for each in self.values)

    @property
    def is_output(self) -> bool:
        """Whether it is a word that a program prints, without a name."""
        return not self.is_known and self.name == template_of(self.values[0])

    @property
    def text(self) -> str:
        """The argument as it can be shown."""
        if is_secret(self.name.lstrip("-").replace("-", "_")):
            return self.name
        shown = " ".join(template_of(each) for each in self.values)
        if self.is_output:
            return shown
        return f"{self.name} {shown}".strip()


@dataclass(kw_only=True)
class Reading:
    """All that was read from one input."""

    project: Project
    name: str  # of the experiment
    arguments: list[Argument] = field(default_factory=list)
    launcher: str = ""  # the program that the command starts, e.g. `train_async.py`
    launched_at: Source | None = None
    environment: dict[str, Text] = field(default_factory=dict)
    notes: list[tuple[Source, str]] = field(default_factory=list)
    given: Mapping[str, str] = field(default_factory=dict)  # by --set
    uses: Mapping[str, VariableUse] = field(default_factory=dict)
    files: Mapping[str, Text] = field(default_factory=dict)
    gpus: tuple[int, int] | None = None  # nodes, and processes of a node, that accelerate or torchrun starts
    configs: list[str] = field(default_factory=list)  # names of the config files that were read


def split_flags(words: Sequence[Text]) -> Iterator[Argument]:
    """The arguments of a command line in the style of argparse: `--name value value`, `--name=value`."""
    name: str | None = None
    values: list[Text] = []
    source = Source(file="", line=1)
    index = 0
    for word in words:
        text = value_of(word)
        if not is_flag(text):
            if name is None:
                # A word before the first argument: only a variable without a value is none.
                if not is_known(word):
                    yield Argument(name=template_of(word), values=(word,), source=word[0].source, index=index)
                    index += 1
                elif text:
                    yield Argument(name=text, values=(), source=word[0].source, index=index)
                    index += 1
            elif not is_known(word) and values and not text:
                # The output of a program may be further arguments.
                yield Argument(name=name, values=tuple(values), source=source, index=index)
                yield Argument(name=template_of(word), values=(word,), source=word[0].source, index=index + 1)
                index, name, values = index + 2, None, []
            elif text or not values:
                # A variable without a value is no further word: `--colocate $EXTRA`.
                values.append(word)
            continue
        if name is not None:
            yield Argument(name=name, values=tuple(values), source=source, index=index)
            index += 1
        source = word[0].source
        name, equals, _ = text.partition("=")
        values = [_after_equals(word)] if equals else []
    if name is not None:
        yield Argument(name=name, values=tuple(values), source=source, index=index)


def is_flag(text: str) -> bool:
    """Whether a word is the name of an argument and no value, such as `-1` or `-1e-4`."""
    return text.startswith("--") and len(text) > 2 and text[2].isalpha()


def _after_equals(word: Text) -> Text:
    """The part of a word behind its first `=`."""
    for number, piece in enumerate(word):
        before, equals, after = piece.value.partition("=")
        if equals and "=" in piece.template and not before.startswith("${"):
            if piece.template != piece.value:
                return (piece,)
            return (*((literal(after, piece.source),) if after else ()), *word[number + 1 :])
    return ()


def read_environment(text: Text) -> dict[str, Text]:
    """The variables of `--runtime-env-json`."""
    source = text[0].source if text else Source(file="", line=1)
    try:
        parsed = json.loads(value_of(text))
    except ValueError:
        return {}
    variables = parsed.get("env_vars", {}) if isinstance(parsed, dict) else {}
    return {str(name): (literal(str(value), source),) for name, value in variables.items()}
