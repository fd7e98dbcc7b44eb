"""A translation in progress: values of keys, and what became of each argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rlscale.config.keys import keys
from rlscale.config.library_limits import LIMITS
from rlscale.config.passthrough import is_passthrough
from rlscale.config.passthrough.megatron_args import RECORDED as MEGATRON_FILE
from rlscale.config.passthrough.megatron_args import RESERVED as MEGATRON_RESERVED
from rlscale.config.passthrough.recorded import read_recorded
from rlscale.config.passthrough.sglang_args import RECORDED as SGLANG_FILE
from rlscale.config.passthrough.sglang_args import RESERVED as SGLANG_RESERVED
from rlscale.config.user_functions import HOOKS
from rlscale.migration.argument_tables import TableRow, read_defaults
from rlscale.migration.findings import Finding, Kind
from rlscale.migration.foreign_arguments import Argument, Project, Reading
from rlscale.migration.settings import Setting, WrongValueError, convert, convert_foreign
from rlscale.migration.shell_values import template_of

LIBRARIES = {"sglang": (SGLANG_FILE, SGLANG_RESERVED), "megatron": (MEGATRON_FILE, MEGATRON_RESERVED)}
"""Group -> the recorded arguments of its library, and those that rlscale sets."""

_IN_PATHS = re.compile(r"[/\\]+")


@dataclass(kw_only=True)
class TranslationDraft:
    """Values by path, and a finding for each argument.

    Invariant: after the translation `places` has every argument once.
    """

    reading: Reading
    settings: dict[str, Setting] = field(default_factory=dict)
    places: dict[int, Finding] = field(default_factory=dict)  # by index of the argument
    findings: list[Finding] = field(default_factory=list)  # of no argument
    options: dict[str, str] = field(default_factory=dict)

    def given(self, name: str) -> Argument | None:
        """The argument of a name; the last one when it is given more than once."""
        found = [argument for argument in self.reading.arguments if argument.plain_name == name]
        return found[-1] if found else None

    def has(self, *names: str) -> bool:
        """Whether one of the arguments is given."""
        return any(self.given(name) is not None for name in names)

    def report(self, argument: Argument, kind: Kind, text: str, *, key: str = "") -> None:
        """Places an argument in the report."""
        assert argument.index not in self.places, f"{argument.name} must have one place"
        self.places[argument.index] = Finding(
            kind=kind, subject=argument.text, text=text, source=argument.source, key=key, argument=argument.index
        )

    def note(self, kind: Kind, subject: str, text: str) -> None:
        """Adds a line of the report that belongs to no argument."""
        self.findings.append(Finding(kind=kind, subject=subject, text=text))

    def set(self, argument: Argument, path: str, setting: Setting, *, note: str = "") -> None:
        """Sets a key to the value of an argument. A note says what changes in its meaning."""
        kind, text = Kind.changed if note else Kind.renamed, note
        limit = LIMITS.get(path)
        if limit is not None and setting.value not in (None, limit.value):
            kind, text = Kind.refused, limit.reason
        elif path in HOOKS:
            kind, text = Kind.hook, _signatures(path, self.reading.project)
        self.settings[path] = replace(setting, comment=note or setting.comment)
        self.report(argument, kind, text, key=path)

    def write(self, path: str, setting: Setting, reason: str) -> None:
        """Sets a key that no argument asks for."""
        self.settings[path] = setting
        self.findings.append(Finding(kind=Kind.written, subject=f"{path}={setting.yaml()}", text=reason))

    def rename(self, argument: Argument, row: TableRow) -> None:
        """Sets the key of a row to the converted value."""
        if not argument.is_known:
            text = "its value is the output of a program; give the variable with --set"
            self.report(argument, Kind.unresolved, text, key=row.key)
            return
        if argument.values and not argument.value and not any(map(template_of, argument.values)):
            self.report(argument, Kind.wrong, "is empty", key=row.key)
            return
        try:
            setting = self._convert(argument, row)
        except WrongValueError as error:
            if argument.value in ("null", "None"):
                self.report(argument, Kind.dropped, "is not set")
                return
            self.report(argument, Kind.lost, f"{row.key} must be {error}")
            return
        if row.key == "run.name" and setting.is_plain and _IN_PATHS.search(str(setting.value)):
            name = _IN_PATHS.sub("-", str(setting.value)).strip("-")
            self.set(argument, row.key, Setting(value=name), note="the name of a run is that of its folder: / is -")
            return
        self.set(argument, row.key, setting, note=row.note)

    def _convert(self, argument: Argument, row: TableRow) -> Setting:
        if row.conversion.startswith("="):
            return Setting(value=row.conversion[1:])
        if row.conversion in ("true", "false"):
            value = row.conversion == "true"
            if argument.values and argument.value.lower() in ("false", "0"):
                value = not value
            return Setting(value=value)
        key = keys().get(row.key)
        if key is not None:
            return convert(argument.values, key)
        assert is_passthrough(row.key), f"the table must name keys, got {row.key}"
        return convert_foreign(argument.values, library_type(row.key) or "any")

    def library(self, argument: Argument, group: str, name: str) -> bool:
        """Sets `<group>.<name>` of SGLang or Megatron-core; returns whether the library has it."""
        path = f"{group}.{name}"
        _, reserved = LIBRARIES[group]
        if name in reserved:
            self.report(argument, Kind.dropped, reserved[name])
            return True
        if library_type(path) is None:
            return False
        self.rename(argument, TableRow(argument=argument.name, key=path, conversion="", note=""))
        return True


def library_type(path: str) -> str | None:
    """The type of an argument of SGLang or Megatron-core; None when there is no such argument."""
    group, _, name = path.partition(".")
    if group not in LIBRARIES:
        return None
    return read_recorded(LIBRARIES[group][0]).types.get(name)


def _signatures(path: str, project: Project) -> str:
    hook = HOOKS[path]
    own = f"({', '.join((*hook.arguments, *hook.optional))})"
    if project is not Project.slime:
        return f"rlscale calls {own}; a function in the form of {project} must be rewritten"
    if not hook.document_arguments:
        return f"rlscale calls {own}; a function in slime's form must be rewritten"
    return f"slime's form ({', '.join(hook.document_arguments)}) is accepted; rlscale's is {own}"


Conversion = Callable[[TranslationDraft, Argument, TableRow], None]
"""Places one argument."""


def translate(draft: TranslationDraft, table: Mapping[str, TableRow], conversions: Mapping[str, Conversion]) -> None:
    """Places every argument: by its row, or by what the project does with others."""
    last = {argument.plain_name: argument.index for argument in draft.reading.arguments}
    for argument in draft.reading.arguments:
        if argument.is_output:
            text = "is the output of a program and may be arguments; give the variable with --set, or write them"
            draft.report(argument, Kind.unresolved, text)
            continue
        if argument.index != last[argument.plain_name]:
            final = draft.reading.arguments[last[argument.plain_name]]
            draft.report(argument, Kind.repeated, f"replaced by `{final.text}` ({final.source})")
            continue
        row = find_row(table, argument.plain_name)
        conversions.get(row.conversion, _plain)(draft, argument, row)


def find_row(table: Mapping[str, TableRow], name: str) -> TableRow:
    """The row of an argument, or the longest row `prefix.*` that covers it."""
    if name in table:
        return table[name]
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if found := table.get(".".join([*parts[:length], "*"])):
            return found
    return TableRow(argument=name, key="", conversion="unknown", note="")


def _plain(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.rename(argument, row)


def place_as(kind: Kind) -> Conversion:
    """A conversion that places an argument in the report with the note of its row."""

    def place(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
        draft.report(argument, kind, row.note, key=row.key if kind is Kind.changed else "")

    return place


def write_defaults(draft: TranslationDraft, *, supervised: bool = False) -> None:
    """Writes the defaults of the project that differ from rlscale's, where no argument sets them."""
    backend = str(draft.settings["train.backend"].value) if "train.backend" in draft.settings else "megatron"
    for default in read_defaults(draft.reading.project):
        known = keys().get(default.key)
        if default.backend not in ("", backend) or draft.has(*default.unless) or default.key in draft.settings:
            continue
        if supervised and default.key.partition(".")[0] in ("algo", "eval", "rollout", "sglang", "cluster", "reward"):
            continue
        value: object = {"true": True, "false": False}.get(default.value, default.value)
        if known is not None and known.type in (int, float):
            value = known.type(default.value)
        if known is None or value != known.default:
            draft.write(default.key, Setting(value=value), default.reason)
