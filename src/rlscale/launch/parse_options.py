"""Parses and checks the options of a launcher; everything else on the command line describes the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rlscale.config.problems import nearest
from rlscale.errors import Problem, show
from rlscale.launch.options import JobOptions, KubeRayOptions, SkyPilotOptions, SlurmOptions
from rlscale.secrets import redact_override

OPTIONS: Mapping[str, type[JobOptions]] = MappingProxyType(
    {"slurm": SlurmOptions, "kuberay": KubeRayOptions, "skypilot": SkyPilotOptions}
)
"""Options by the name of their launcher."""

COMMAND_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--output": "file to write; default: <name> and the suffix of the launcher, in this folder",
        "--stdout": "print the file and write none",
        "--submit": "write the file and submit it",
    }
)
"""Flags about the file itself, which every launcher has."""


@dataclass(kw_only=True, slots=True)
class LaunchArguments:
    """A command line, split into options, flags about the file, and the description of the run."""

    options: JobOptions | None = None  # None: there are problems
    output: str | None = None
    stdout: bool = False
    submit: bool = False
    remaining: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def flag_of(name: str) -> str:
    """`save_before` -> `--save-before`."""
    return f"--{name.replace('_', '-')}"


def parse_launch_arguments(launcher: str, argv: Sequence[str]) -> LaunchArguments:
    """Parses the arguments that follow the name of the launcher."""
    arguments, values = LaunchArguments(), dict[str, Any]()
    fields = {flag_of(name): name for name in option_schemas(launcher)}
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        flag, equals, value = argument.partition("=")
        if flag in ("--stdout", "--submit") and not equals:
            setattr(arguments, flag.lstrip("-"), True)
        elif flag in fields and is_switch(launcher, fields[flag]) and not equals:
            values[fields[flag]] = True
        elif flag in fields or flag == "--output":
            if not equals and (not remaining or remaining[0].startswith("--")):
                fix = f"write {flag} <value>"
                arguments.problems.append(Problem(path=flag, rule="have a value", value="nothing", fix=fix))
                values[fields.get(flag, "")] = None  # reported once
                continue
            value = value if equals else remaining.pop(0)
            if flag == "--output":
                arguments.output = value
            elif is_repeated(launcher, fields[flag]):
                values.setdefault(fields[flag], []).append(value)
            else:
                values[fields[flag]] = value
        elif problem := _unknown_flag(flag, launcher, fields):
            arguments.problems.append(problem)
            # A misspelt flag takes its value along, so that the value is not reported as an override.
            if not equals and remaining and not remaining[0].startswith("--") and "=" not in remaining[0]:
                remaining.pop(0)
        else:
            arguments.remaining.append(argument)
    _check_values(launcher, arguments, values)
    return arguments


@cache
def option_schemas(launcher: str) -> Mapping[str, Mapping[str, Any]]:
    """The JSON schema of each option, by the name of its field."""
    # pydantic finds the docstrings of a class's own fields only.
    shared, own = (TypeAdapter(kind).json_schema()["properties"] for kind in (JobOptions, OPTIONS[launcher]))
    return {name: shared.get(name, schema) for name, schema in own.items()}


def value_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of one value: of an optional one without null, of a repeated one that of an entry."""
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            return {**choice}
    found: Mapping[str, Any] = schema["items"] if schema.get("type") == "array" else schema
    return found


def is_switch(launcher: str, name: str) -> bool:
    """Whether an option has no value."""
    return option_schemas(launcher)[name].get("type") == "boolean"


def is_repeated(launcher: str, name: str) -> bool:
    """Whether an option may be given several times."""
    return option_schemas(launcher)[name].get("type") == "array"


@cache
def _adapter(launcher: str) -> TypeAdapter[Any]:
    return TypeAdapter(OPTIONS[launcher])


def _unknown_flag(flag: str, launcher: str, fields: Mapping[str, str]) -> Problem | None:
    """The problem of a misspelt option, or of one of another launcher. None: it may be a key written as a flag."""
    if not flag.startswith("--"):
        return None
    if owner := next((name for name in OPTIONS if flag in map(flag_of, option_schemas(name))), None):
        fix = f"it is an option of {owner}; rlscale-launch {launcher} --help lists those of {launcher}"
        return Problem(path=flag, rule=f"be an option of {launcher}", value=flag, fix=fix)
    found = nearest(flag, [*fields, *COMMAND_FLAGS], limit=2)
    if found is None or found == flag:
        return None
    return Problem(path=flag, rule="be a known option", value=flag, fix=f"did you mean {found}?")


def _check_values(launcher: str, arguments: LaunchArguments, values: Mapping[str, Any]) -> None:
    reported = {problem.path for problem in arguments.problems}
    try:
        arguments.options = _adapter(launcher).validate_python({name: v for name, v in values.items() if name})
    except ValidationError as error:
        found = (_to_problem(launcher, details) for details in error.errors())
        arguments.problems += [problem for problem in found if problem.path not in reported]


def _to_problem(launcher: str, error: ErrorDetails) -> Problem:
    name = str(error["loc"][0])
    flag, schema = flag_of(name), value_schema(option_schemas(launcher)[name])
    example = next(iter(schema.get("examples", ())), None)
    fix = f"write e.g. {flag} {example}" if example is not None else f"remove {flag} to use the default"
    if error["type"] == "missing":
        fix = f"add {flag} {example}" if example is not None else f"add {flag} <value>"
        return Problem(path=flag, rule="be given", value="nothing", fix=fix)
    rule = schema.get("title", "be valid")
    if schema.get("type") == "integer":
        rule = f"be an integer, at least {schema['minimum']}"
    return Problem(path=flag, rule=rule, value=redact_override(show(error["input"])), fix=fix)
