"""Which sets an evaluation has, and how each is answered: `eval.prompt_data`, or the file of `eval.config`.

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

from rlscale.config.errors import from_pydantic, show
from rlscale.config.groups.eval import EvalConfig
from rlscale.config.keys import keys
from rlscale.config.suggest import nearest
from rlscale.errors import ConfigError, Problem

OF_A_SET = (
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
"""Keys of the group `eval` that a set of the file can have for itself."""

_BODY = ("defaults", "datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetConfig:
    """One set: its name, its file, and the group `eval` as it holds for this set."""

    name: str
    path: str
    eval: EvalConfig


def eval_sets(config: EvalConfig) -> list[EvalSetConfig]:
    """The sets of an evaluation; one path of `eval.prompt_data` alone is called `eval`. Empty where there are none.

    Raises:
        ConfigError: the file of `eval.config` cannot be used; names everything that is wrong with it.
    """
    if config.config is not None:
        return _read(config, config.config)
    given = config.prompt_data or []
    pairs = [("eval", given[0])] if len(given) == 1 else zip(given[::2], given[1::2], strict=True)
    return [EvalSetConfig(name=name, path=path, eval=config) for name, path in pairs]


@cache
def _adapter() -> TypeAdapter[EvalConfig]:
    return TypeAdapter(EvalConfig)


def _read(config: EvalConfig, path: str) -> list[EvalSetConfig]:
    try:
        content: Any = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _error("name a YAML file that can be read", path, " ".join(str(error).split())) from error
    body = content.get("eval") if isinstance(content, Mapping) else None
    datasets = body.get("datasets") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(datasets, list) or not datasets:
        fix = "write eval: {defaults: {...}, datasets: [{name: ..., path: ...}, ...]}"
        raise _error("name a file with eval.datasets, a list", path, fix)
    problems = [_unknown(path, f"eval.{name}", name, _BODY) for name in body if name not in _BODY]
    defaults = body.get("defaults") or {}
    problems += _wrong_names(path, "eval.defaults", defaults, OF_A_SET)
    sets: list[EvalSetConfig] = []
    for number, entry in enumerate(datasets):
        place = f"eval.datasets[{number}]"
        found = _wrong_names(path, place, entry, ("name", "path", *OF_A_SET))
        found += [] if found else _without_name(path, place, entry)
        problems += found
        if not problems:
            made = _make(config, path, place, dict(defaults) | dict(entry))
            problems += made if isinstance(made, list) else []
            sets += [made] if isinstance(made, EvalSetConfig) else []
    names = [each.name for each in sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(_problem("give each set its own name", f"{name} twice in {path}", "rename one"))
    if problems:
        raise ConfigError(problems)
    return sets


def _make(config: EvalConfig, path: str, place: str, entry: dict[str, Any]) -> EvalSetConfig | list[Problem]:
    own = {name: value for name, value in entry.items() if name in OF_A_SET}
    try:
        checked = _adapter().validate_python(own)
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = [from_pydantic(each, key=keys()[f"eval.{each['loc'][0]}"], origin="") for each in details]
        return [
            _problem(f"have {place}.{each.path} that must {each.rule}", f"{each.value} in {path}", "leave it out")
            for each in found
        ]
    given = {name: getattr(checked, name) for name in own}
    return EvalSetConfig(name=entry["name"], path=entry["path"], eval=replace(config, **given))


def _wrong_names(path: str, place: str, entry: Any, known: Sequence[str]) -> list[Problem]:
    if not isinstance(entry, Mapping):
        return [_problem(f"have a mapping as {place}", f"{show(entry)} in {path}", "write `key: value` pairs")]
    return [_unknown(path, f"{place}.{name}", str(name), known) for name in entry if name not in known]


def _without_name(path: str, place: str, entry: Mapping[str, Any]) -> list[Problem]:
    wrong = [name for name in ("name", "path") if not isinstance(entry.get(name), str) or not entry[name]]
    return [
        _problem(f"have a text as {place}.{name}", f"{show(entry.get(name))} in {path}", f"add {name}: <text>")
        for name in wrong
    ]


def _unknown(path: str, place: str, name: str, known: Sequence[str]) -> Problem:
    found = nearest(name, known)
    fix = f"did you mean {found}?" if found else f"it can have {', '.join(known)}"
    return _problem("hold known keys only", f"{place} in {path}", fix)


def _problem(rule: str, value: str, fix: str) -> Problem:
    return Problem(path="eval.config", rule=rule, value=value, fix=fix)


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([_problem(rule, value, fix)])
