"""The data sets of an evaluation and their sampling: from `eval.prompt_data`, or from the file `eval.config`.

eval:
  defaults: {n_samples_per_prompt: 4, temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl, max_response_len: 16384}
    - {name: gsm8k, path: gsm8k.jsonl, n_samples_per_prompt: 1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from rlscale.config.errors import from_pydantic, nearest, show
from rlscale.config.groups.eval import EvalConfig
from rlscale.config.keys import keys
from rlscale.errors import ConfigError, Problem

SET_KEYS = (
    "input_key",
    "label_key",
    "reward_key",
    "n_samples_per_prompt",
    "temperature",
    "top_p",
    "top_k",
    "max_response_len",
    "min_new_tokens",
    "max_examples",
)
"""Keys of the group `eval` that the file can set for each data set."""

_BODY_KEYS = ("defaults", "datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetConfig:
    """One data set: its name, its file, and the group `eval` with the values of this set."""

    name: str
    path: str
    eval: EvalConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalFileEntry:
    """One data set of the file of `eval.config`: its name, its file, and its own values of `SET_KEYS`."""

    name: str
    path: str
    settings: Mapping[str, Any]


def eval_sets(config: EvalConfig) -> list[EvalSetConfig]:
    """The data sets of an evaluation; a single path in `eval.prompt_data` is named `eval`. Empty without any.

    Raises:
        ConfigError: the file of `eval.config` cannot be used; lists all its problems.
    """
    if config.config is not None:
        return [
            EvalSetConfig(name=each.name, path=each.path, eval=replace(config, **each.settings))
            for each in read_eval_file(config.config)
        ]
    given = config.prompt_data or []
    # Names and paths alternate.
    pairs = [("eval", given[0])] if len(given) == 1 else zip(given[::2], given[1::2], strict=True)
    return [EvalSetConfig(name=name, path=path, eval=config) for name, path in pairs]


@cache
def _adapter() -> TypeAdapter[EvalConfig]:
    return TypeAdapter(EvalConfig)


def read_eval_file(path: str) -> list[EvalFileEntry]:
    """Reads and checks the file of `eval.config`.

    Raises:
        ConfigError: the file cannot be used; lists all its problems.
    """
    try:
        content: Any = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _error("name a readable YAML file", path, " ".join(str(error).split())) from error
    body = content.get("eval") if isinstance(content, Mapping) else None
    datasets = body.get("datasets") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(datasets, list) or not datasets:
        fix = "write eval: {defaults: {...}, datasets: [{name: ..., path: ...}, ...]}"
        raise _error("name a file with eval.datasets, a list", path, fix)
    problems = [_unknown_key(path, f"eval.{name}", name, _BODY_KEYS) for name in body if name not in _BODY_KEYS]
    defaults = body.get("defaults") or {}
    problems += _key_problems(path, "eval.defaults", defaults, SET_KEYS)
    sets: list[EvalFileEntry] = []
    for number, entry in enumerate(datasets):
        place = f"eval.datasets[{number}]"
        found = _key_problems(path, place, entry, ("name", "path", *SET_KEYS))
        found += [] if found else _name_problems(path, place, entry)
        problems += found
        # Build sets only while the file is valid; afterwards only collect problems.
        if not problems:
            made = _make_entry(path, place, dict(defaults) | dict(entry))
            problems += made if isinstance(made, list) else []
            sets += [made] if isinstance(made, EvalFileEntry) else []
    names = [each.name for each in sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(_problem("give each set a unique name", f"{name} twice in {path}", "rename one"))
    if problems:
        raise ConfigError(problems)
    return sets


def _make_entry(path: str, place: str, entry: dict[str, Any]) -> EvalFileEntry | list[Problem]:
    own = {name: value for name, value in entry.items() if name in SET_KEYS}
    try:
        checked = _adapter().validate_python(own)
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = [from_pydantic(each, key=keys()[f"eval.{each['loc'][0]}"], origin="") for each in details]
        return [
            _problem(f"have {place}.{each.path} that must {each.rule}", f"{each.value} in {path}", "remove it")
            for each in found
        ]
    # Only keys of the file override the group: the validated group has a default for every other key.
    given = {name: getattr(checked, name) for name in own}
    return EvalFileEntry(name=entry["name"], path=entry["path"], settings=given)


def _key_problems(path: str, place: str, entry: Any, known: Sequence[str]) -> list[Problem]:
    if not isinstance(entry, Mapping):
        return [_problem(f"have a mapping as {place}", f"{show(entry)} in {path}", "write `key: value` pairs")]
    return [_unknown_key(path, f"{place}.{name}", str(name), known) for name in entry if name not in known]


def _name_problems(path: str, place: str, entry: Mapping[str, Any]) -> list[Problem]:
    wrong = [name for name in ("name", "path") if not isinstance(entry.get(name), str) or not entry[name]]
    return [
        _problem(f"have a string as {place}.{name}", f"{show(entry.get(name))} in {path}", f"add {name}: <string>")
        for name in wrong
    ]


def _unknown_key(path: str, place: str, name: str, known: Sequence[str]) -> Problem:
    found = nearest(name, known)
    fix = f"did you mean {found}?" if found else f"known keys: {', '.join(known)}"
    return _problem("contain known keys only", f"{place} in {path}", fix)


def _problem(rule: str, value: str, fix: str) -> Problem:
    return Problem(path="eval.config", rule=rule, value=value, fix=fix)


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([_problem(rule, value, fix)])
