"""The shortest way to say a configuration: its differences from the defaults, the options and what is derived."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from rlscale.config.check_fields import adapter, check_fields
from rlscale.config.groups.cluster import Device
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.grammar import is_readable
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS, put_value, read_yaml_files
from rlscale.config.inspect.diff import NAMES
from rlscale.config.keys import keys
from rlscale.config.load import load_config_with_notes
from rlscale.config.passthrough import is_passthrough, passthrough_groups
from rlscale.config.resolve.defaults import resolve
from rlscale.config.rules import check_rules
from rlscale.config.run_config import RunConfig
from rlscale.config.to_yaml import flatten, to_dict
from rlscale.errors import ConfigError
from rlscale.secrets import REDACTED

Values = dict[str, Any]
"""By full path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Minimal:
    """Options and values that resolve to a configuration; no value can be left out."""

    options: Mapping[str, str]
    values: Values
    experiment: str | None = None  # they are differences from it

    def yaml(self) -> str:
        """As the file of an experiment."""
        body: Values = {"defaults": [{f"override /{group}": name} for group, name in self.options.items()]}
        for path, value in self.values.items():
            put_value(body, path, value)
        if not self.options:
            del body["defaults"]
        return "# @package _global_\n" + yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=120)

    def words(self) -> list[str]:
        """As words of a command line, quoted for Hydra and not yet for the shell."""
        chosen = [f"{group}={name}" for group, name in self.options.items()]
        return [f"experiment={self.experiment or 'null'}", *chosen, *map(_word, self.values, self.values.values())]

    def command(self) -> str:
        """As a command line."""
        return " ".join(["rlscale-train", *map(shlex.quote, self.words())])


def minimize(resolved: Mapping[str, Any], *, folders: ConfigFolders | None = None) -> Minimal:
    """Options and further values for a whole resolved configuration.

    Args:
        resolved: nested values, as `to_dict` and the `config.yaml` of a run folder have them. Secrets that were taken
            out of it, and names and folders of the run that are derived, are left out.
        folders: where options lie. None: those that come with rlscale.

    Raises: ConfigError when the values are not right, e.g. because the file was written by another version.
    """
    target = _Target(resolved)
    values = target.reduce({path: key.default for path, key in keys().items() if not key.required})
    folders = folders or ConfigFolders.find()
    base: Values = {}
    options: dict[str, str] = {}
    for group, names in folders.groups().items():
        if group in GLOBAL_GROUPS:
            continue
        candidates = ((name, dict(_option_values(group, name, folders))) for name in names)
        found = [
            (len(covered), -len(own), name, own)
            for name, own in candidates
            if (covered := [path for path, value in own.items() if path in values and values[path] == value])
            and target.is_met_by({**base, **own, **values})
        ]
        if found:
            _, _, options[group], own = max(found)
            base |= own
    return Minimal(options=options, values={path: v for path, v in values.items() if base.get(path, _NOTHING) != v})


def minimize_from(resolved: Mapping[str, Any], experiment: str, *, folders: ConfigFolders | None = None) -> Minimal:
    """The values in which a resolved configuration differs from an experiment; raises as `minimize` does."""
    target = _Target(resolved)
    extra = folders.extra if folders is not None else None
    composed = load_config_with_notes([f"experiment={experiment}"], config_dir=extra, to_run=False).composed
    base = {path: key.default for path, key in keys().items() if not key.required}
    return Minimal(options={}, values=target.reduce(base | dict(flatten(composed.values))), experiment=experiment)


_NOTHING = object()


class _Dumper(yaml.SafeDumper):
    """Lists of plain values in one line, all else line by line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    is_plain = not any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_plain)


_Dumper.add_representer(list, _represent_list)


class _Target:
    """A resolved configuration, and whether others resolve to it."""

    def __init__(self, resolved: Mapping[str, Any]) -> None:
        given = deepcopy(dict(resolved))
        self._run = given.pop("run", {})
        checked = check_fields(given, lambda _: "")
        kept = [problem for problem in checked.problems if problem.value != REDACTED]
        if kept:
            raise ConfigError(kept)
        self._config = checked.config
        # A machine of the other kind: what holds on both is what the configuration says itself.
        self._has_cuda = self._config.cluster.device != Device.cuda
        self._config.run.experiment = self._run.get("experiment")
        self._wanted = self._resolve(self._config)

    def reduce(self, base: Values) -> Values:
        """The values that must be set on top of `base`; each is needed."""
        own = {path: value for path, value in flatten(to_dict(self._config)) if not path.startswith("run.")}
        kept = {
            path: value
            for path, value in own.items()
            if value != REDACTED and path not in NAMES and (path not in base or base[path] != value)
        }
        for path in list(kept):
            fewer = {name: value for name, value in kept.items() if name != path}
            if self.is_met_by({**base, **fewer}):
                kept = fewer
        return kept

    def is_met_by(self, values: Values) -> bool:
        """Whether the values, and defaults for the rest, keep the rules and resolve to the configuration."""
        nested: Values = {}
        for path, value in values.items():
            group, _, name = path.partition(".")
            put_value(nested, f"{group}.{passthrough_groups()[group]}.{name}" if is_passthrough(path) else path, value)
        try:
            config = adapter().validate_python(nested)
        except ValidationError:
            return False  # e.g. an interpolation in the file of an option
        if check_rules(config, broken=set()):
            return False
        config.run.experiment = self._run.get("experiment")
        return self._resolve(config) == self._wanted

    def _resolve(self, config: RunConfig) -> Values:
        resolved, _ = resolve(config, has_cuda=lambda: self._has_cuda)
        return {path: value for path, value in flatten(to_dict(resolved)) if path not in NAMES and value != REDACTED}


def _option_values(group: str, name: str, folders: ConfigFolders) -> Iterable[tuple[str, Any]]:
    return flatten(read_yaml_files([(group, name)], folders).values())


def _word(path: str, value: Any) -> str:
    return f"{path}={_text(value)}"


def _text(value: Any) -> str:
    """A value in the grammar of Hydra's words."""
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        plain = bool(value) and is_readable(f"x={value}") and yaml.safe_load(value) == value and "," not in value
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
