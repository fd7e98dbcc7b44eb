"""Reduces a configuration to its differences from the defaults, the options and the derived values."""

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
from rlscale.config.hydra.grammar import is_parsable
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS, read_yaml_files, set_nested
from rlscale.config.inspect.diff import RUN_NAMES
from rlscale.config.keys import keys
from rlscale.config.load import load_config_with_notes
from rlscale.config.passthrough import is_passthrough, passthrough_groups
from rlscale.config.resolve.defaults import resolve
from rlscale.config.rules import check_rules
from rlscale.config.run_config import RunConfig
from rlscale.config.serialize import flatten, to_dict
from rlscale.errors import ConfigError
from rlscale.secrets import REDACTED

Values = dict[str, Any]
"""By full path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Minimal:
    """Options and values that resolve to a configuration; every value is needed."""

    options: Mapping[str, str]
    values: Values
    experiment: str | None = None  # the values are differences from it

    def yaml(self) -> str:
        """The file of an experiment."""
        body: Values = {"defaults": [{f"override /{group}": name} for group, name in self.options.items()]}
        for path, value in self.values.items():
            set_nested(body, path, value)
        if not self.options:
            del body["defaults"]
        return "# @package _global_\n" + yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=120)

    def overrides(self) -> list[str]:
        """The overrides of a command line, quoted for Hydra but not for the shell."""
        selected = [f"{group}={name}" for group, name in self.options.items()]
        return [
            f"experiment={self.experiment or 'null'}",
            *selected,
            *map(_override, self.values, self.values.values()),
        ]

    def command(self) -> str:
        """The command line."""
        return " ".join(["rlscale-train", *map(shlex.quote, self.overrides())])


def minimize(resolved: Mapping[str, Any], *, folders: ConfigFolders | None = None) -> Minimal:
    """Options and further values for a whole resolved configuration.

    Args:
        resolved: nested values, as in `to_dict` and in the `config.yaml` of a run folder. Redacted secrets and derived
            names and folders of the run are skipped.
        folders: the folders of options. None: those of rlscale.

    Raises: ConfigError when the values are invalid, e.g. because another version wrote the file.
    """
    target = _ResolvedTarget(resolved)
    values = target.reduce({path: key.default for path, key in keys().items() if not key.required})
    # Choose one option per group, if one has values in common with the configuration.
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
            and target.matches({**base, **own, **values})
        ]
        if found:
            # The option that covers most values; of those, the one that sets the fewest others.
            _, _, options[group], own = max(found)
            base |= own
    return Minimal(options=options, values={path: v for path, v in values.items() if base.get(path, _NOTHING) != v})


def minimize_from(resolved: Mapping[str, Any], experiment: str, *, folders: ConfigFolders | None = None) -> Minimal:
    """The values in which a resolved configuration differs from an experiment; raises as `minimize` does."""
    target = _ResolvedTarget(resolved)
    extra = folders.extra if folders is not None else None
    composed = load_config_with_notes([f"experiment={experiment}"], config_dir=extra, to_run=False).composed
    base = {path: key.default for path, key in keys().items() if not key.required}
    return Minimal(options={}, values=target.reduce(base | dict(flatten(composed.values))), experiment=experiment)


_NOTHING = object()


class _Dumper(yaml.SafeDumper):
    """Writes lists of plain values on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    is_plain = not any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_plain)


_Dumper.add_representer(list, _represent_list)


class _ResolvedTarget:
    """A resolved configuration to compare others with."""

    def __init__(self, resolved: Mapping[str, Any]) -> None:
        given = deepcopy(dict(resolved))
        self._run = given.pop("run", {})
        checked = check_fields(given, lambda _: "")
        kept = [problem for problem in checked.problems if problem.value != REDACTED]
        if kept:
            raise ConfigError(kept)
        self._config = checked.config
        # Resolve as on a machine of the other kind: a value that holds there too does not depend on the machine.
        self._has_cuda = self._config.cluster.device != Device.cuda
        self._config.run.experiment = self._run.get("experiment")
        self._wanted = self._resolve(self._config)

    def reduce(self, base: Values) -> Values:
        """The values that must be set on top of `base`; every one is needed."""
        own = {path: value for path, value in flatten(to_dict(self._config)) if not path.startswith("run.")}
        kept = {
            path: value
            for path, value in own.items()
            if value != REDACTED and path not in RUN_NAMES and (path not in base or base[path] != value)
        }
        # Try to remove each value: it may be derived from the others.
        for path in list(kept):
            fewer = {name: value for name, value in kept.items() if name != path}
            if self.matches({**base, **fewer}):
                kept = fewer
        return kept

    def matches(self, values: Values) -> bool:
        """Whether the values, with defaults for the rest, break no rule and resolve to the configuration."""
        nested: Values = {}
        for path, value in values.items():
            group, _, name = path.partition(".")
            own = f"{group}.{passthrough_groups()[group]}.{name}" if is_passthrough(path) else path
            # A copy: an entry of a mapping would be set in the default of its key, which all configs share.
            set_nested(nested, own, dict(value) if isinstance(value, dict) else value)
        try:
            config = adapter().validate_python(nested)
        except ValidationError:
            return False  # e.g. an interpolation in the file of an option
        if check_rules(config, broken=set()):
            return False
        config.run.experiment = self._run.get("experiment")
        return self._resolve(config) == self._wanted

    def _resolve(self, config: RunConfig) -> Values:
        config.run.name = "compared"  # else it is named by a hash of all values, computed each time
        resolved, _ = resolve(config, has_cuda=lambda: self._has_cuda)
        return {
            path: value for path, value in flatten(to_dict(resolved)) if path not in RUN_NAMES and value != REDACTED
        }


def _option_values(group: str, name: str, folders: ConfigFolders) -> Iterable[tuple[str, Any]]:
    return flatten(read_yaml_files([(group, name)], folders).values())


def _override(path: str, value: Any) -> str:
    return f"{path}={_text(value)}"


def _text(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        # Quote what Hydra or YAML would read as something else than this string.
        plain = bool(value) and is_parsable(f"x={value}") and yaml.safe_load(value) == value and "," not in value
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
