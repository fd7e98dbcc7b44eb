"""The file of `eval.config`: evaluation sets, each with its sampling, stop, reward, tools and generate function.

eval:
  defaults: {n_samples_per_prompt: 4, temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 16384}
    - {name: gsm8k, path: gsm8k.jsonl, n_samples_per_prompt: 1, stop: ["</answer>"]}

Files of slime have the same form, and load unchanged: `n_samples_per_eval_prompt`, `datasets` as a mapping by name, a
file without `eval` around it, values like `${oc.env:HOME}`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup
from rlscale.config.groups.reward import RewardType
from rlscale.config.problems import describe_rule, enum_choices, nearest, show
from rlscale.config.yaml_aliases import check_aliases, read_yaml_text
from rlscale.errors import ConfigError, Problem

_BODY_KEYS = ("defaults", "datasets")
_SAMPLES, _SLIME_SAMPLES = "n_samples_per_prompt", "n_samples_per_eval_prompt"

NO_EFFECT = (
    "app_service",
    "eval_early_stop_idle_timeout",
    "eval_early_stop_remaining",
    "eval_task_timeout",
    "message_processor",
    "min_eval_samples",
    "remote_environment",
    "reward_model",
)
"""Keys of slime's files that slime accepts and never reads."""

Name = Annotated[str, Field(min_length=1)]
DottedPath = Annotated[str, Field(pattern=DOTTED_PATH)]


@dataclass(kw_only=True)
class EvalFileSet(ConfigGroup):
    """One data set of the file. None: the value of the run."""

    name: Name
    path: Name

    # As the keys of the group `eval` with the same name.
    input_key: Name | None = None
    label_key: Name | None = None
    tool_key: Name | None = None
    reward_key: Name | None = None
    n_samples_per_prompt: Annotated[int | None, Field(gt=0)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    max_response_len: Annotated[int | None, Field(gt=0)] = None
    min_new_tokens: Annotated[int | None, Field(ge=0)] = None
    max_examples: Annotated[int | None, Field(gt=0)] = None

    # Prompts; as the keys of the group `data` with the same name.
    metadata_key: Name | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    """Entries that replace those of the metadata of every row."""

    # Sampling beyond that of the group `eval`.
    stop: list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    # User code and rewards.
    rm_type: RewardType | None = None
    """Reward of all rows of the set; as `reward.type`."""

    custom_rm_path: DottedPath | None = None
    """As `reward.custom_path`; takes precedence over `rm_type`."""

    custom_generate_function_path: DottedPath | None = None
    """As `sampling.custom_generate_function_path`."""

    ignored: tuple[str, ...] = ()
    """Keys of the file that have no effect."""


OF_GROUP = (
    "input_key",
    "label_key",
    "tool_key",
    "reward_key",
    "n_samples_per_prompt",
    "temperature",
    "top_p",
    "top_k",
    "max_response_len",
    "min_new_tokens",
    "max_examples",
)
"""Keys of a set that replace the key of the group `eval` with the same name."""

_SET_KEYS = tuple(each.name for each in fields(EvalFileSet) if each.name != "ignored")
_KNOWN = (*_SET_KEYS, _SLIME_SAMPLES, "multimodal_keys", *NO_EFFECT)
_OF_DEFAULTS = tuple(name for name in _KNOWN if name not in ("name", "path"))


@cache
def _adapter() -> TypeAdapter[EvalFileSet]:
    return TypeAdapter(EvalFileSet)


def read_eval_file(path: str) -> list[EvalFileSet]:
    """Reads and checks the file of `eval.config`.

    Raises:
        ConfigError: the file cannot be used; lists all its problems.
    """
    body = _read_body(path)
    problems = [_unknown_key(path, f"eval.{name}", str(name), _BODY_KEYS) for name in body if name not in _BODY_KEYS]
    defaults = body.get("defaults") or {}
    problems += _key_problems(path, "eval.defaults", defaults, _OF_DEFAULTS)
    sets: list[EvalFileSet] = []
    for place, entry in _entries(body["datasets"]):
        found = _key_problems(path, place, entry, _KNOWN)
        found += [] if found else _name_problems(path, place, entry)
        problems += found
        # Build sets only while the file is valid; afterwards only collect problems.
        if not problems:
            made = _make_set(path, place, {**_plain_keys(defaults), **_plain_keys(entry)})
            problems += made if isinstance(made, list) else []
            sets += [made] if isinstance(made, EvalFileSet) else []
    names = [each.name for each in sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(_problem("give each set a unique name", f"{name} twice in {path}", "rename one"))
    if problems:
        raise ConfigError(problems)
    return sets


def _read_body(path: str) -> Mapping[str, Any]:
    """The mapping with `datasets`: the value of `eval`, or the whole file."""
    # Trainer ranks import the rules, which import this module, and read no file: OmegaConf takes a fifth of a second.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Like slime: OmegaConf resolves `${...}`, and rejects a key that is given twice.
        file = Path(os.path.expanduser(path))
        check_aliases(read_yaml_text(file))
        loaded = OmegaConf.load(file)
        content: Any = OmegaConf.to_container(loaded, resolve=True)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise _error("name a readable YAML file", path, " ".join(str(error).split())) from error
    body = content.get("eval", content) if isinstance(content, Mapping) else None
    datasets = body.get("datasets") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(datasets, list | Mapping) or not datasets:
        fix = "write eval: {defaults: {...}, datasets: [{name: ..., path: ...}, ...]}"
        raise _error("name a file with eval.datasets, a list or a mapping by name", path, fix)
    return body


def _entries(datasets: Any) -> Iterator[tuple[str, Any]]:
    """Place and entry of each set; in a mapping the key is the name of a set that has no other."""
    if isinstance(datasets, Mapping):
        for name, entry in datasets.items():
            is_usable = entry is None or isinstance(entry, Mapping)
            yield f"eval.datasets.{name}", {"name": str(name), **(entry or {})} if is_usable else entry
    else:
        for number, entry in enumerate(datasets):
            yield f"eval.datasets[{number}]", entry


def _plain_keys(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with our own name of the number of samples."""
    return {_SAMPLES if name == _SLIME_SAMPLES else str(name): value for name, value in entry.items()}


def _make_set(path: str, place: str, entry: dict[str, Any]) -> EvalFileSet | list[Problem]:
    # A null of the set beats a default, as in slime; then the value of the run counts.
    given = {name: value for name, value in entry.items() if value is not None}
    if given.pop("multimodal_keys", None):
        rule = f"have no {place}.multimodal_keys: every set has data.multimodal_keys"
        return [_problem(rule, f"{show(entry['multimodal_keys'])} in {path}", "set data.multimodal_keys instead")]
    ignored = tuple(name for name in NO_EFFECT if given.pop(name, None) is not None)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return _adapter().validate_python({**given, "ignored": ignored})
    except ValidationError as error:
        found = error.errors(include_url=False)
        return [
            Problem(
                path=f"{place}.{'.'.join(map(str, each['loc']))} of eval.config",
                rule=describe_rule(each),
                value=f"{show(each['input'])} in {path}",
                fix=_value_fix(each),
            )
            for each in found
        ]


def _value_fix(error: ErrorDetails) -> str:
    found = nearest(str(error["input"]), enum_choices(error)) if error["type"] == "enum" else None
    return f"did you mean {found}?" if found else "correct or remove it"


def _key_problems(path: str, place: str, entry: Any, known: Sequence[str]) -> list[Problem]:
    if not isinstance(entry, Mapping):
        return [_problem(f"have a mapping as {place}", f"{show(entry)} in {path}", "write `key: value` pairs")]
    problems = [_unknown_key(path, f"{place}.{name}", str(name), known) for name in entry if name not in known]
    if _SAMPLES in entry and _SLIME_SAMPLES in entry:
        rule = f"have one of {place}.{_SAMPLES} and {place}.{_SLIME_SAMPLES}"
        problems.append(_problem(rule, f"both in {path}", "remove one"))
    return problems


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
