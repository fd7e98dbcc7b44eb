"""The file of `sglang.config`: models on SGLang servers, in slime's form.

sglang:
  - name: actor
    server_groups: [{worker_type: regular, num_gpus: 8, num_gpus_per_engine: 2, overrides: {page_size: 16}}]
  - name: reward
    model_path: /models/judge
    server_groups: [{worker_type: regular, num_gpus: 4}]

The model whose weights are updated sets keys of the rollout engines; the one that `reward.engine.name` names sets those
of `reward.engine`, and all others `sglang.frozen_models`. So the rules between keys hold for the file, too. Arguments
that prefill and decode servers of the policy share are keys, and the others are in `sglang.server_groups`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlscale.config.passthrough.check import check_passthrough
from rlscale.config.problems import nearest, show
from rlscale.config.server_groups import SIZE, ServerRole
from rlscale.config.yaml_aliases import load_yaml, read_yaml_text
from rlscale.errors import ConfigError, Problem

KEY = "sglang.config"
NAME_KEY = "reward.engine.name"
MODELS_KEY = "sglang.frozen_models"
GROUPS_KEY = "sglang.server_groups"

_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_FORM = "write sglang: [{name: actor, server_groups: [{worker_type: regular, num_gpus: 8}]}]"

_REFUSED_TYPES = {
    "encoder": "encoder servers of SGLang 0.5.23 take no weight updates; use regular",
    "placeholder": "cluster.num_gpus_per_node and cluster.colocate place trainers and engines; remove the group",
}
"""Worker types of slime that a run cannot start, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    role: ServerRole | None  # None: regular
    num_gpus: int
    num_gpus_per_engine: int | None
    overrides: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """One model of the file. Its server groups are equal, and counted together, or separate prefill and decode."""

    name: str
    model_path: str | None  # None: the model of the run
    update_weights: bool | None  # None: whether it is the model of the run
    num_gpus: int
    num_gpus_per_engine: int | None  # None: not set, or that of each group
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of all its servers
    groups: tuple[_Group, ...] = ()  # prefill and decode; empty: every server does both

    def is_updated(self, hf_checkpoint: Any) -> bool:
        """Whether the trainer sends it weights."""
        if self.update_weights is not None:
            return self.update_weights
        return self.model_path is None or self.model_path == hf_checkpoint


def merge_engine_file(values: dict[str, Any], is_given: Callable[[str], bool]) -> list[Problem]:
    """Merges the file of `sglang.config` into the composed values of a config.

    Args:
        values: the composed config, nested; `cluster`, `sglang` and `reward` are changed.
        is_given: whether the user gave the value of a key, on the command line or in a file. Values of options of
            rlscale, such as `cluster=cpu`, are replaced.

    Returns: problems of the file, which is then not merged, and of keys that have another value.
    """
    path = _get(values, KEY)
    if not isinstance(path, str) or not path:
        return []  # absent, or reported as a wrong type
    if _get(values, "rollout.engine") != "sglang" or _get(values, "rollout.external"):
        return []  # a warning says that the file has no effect
    try:
        models = read_engine_file(path)
    except ConfigError as error:
        return list(error.problems)
    checkpoint = _get(values, "model.hf_checkpoint")
    actors = [each for each in models if each.is_updated(checkpoint)]
    named = _reward_problems(path, models, actors, values)
    problems = _actor_problems(path, actors, checkpoint) + _group_problems(path, models, actors, values)
    if problems:
        return problems + named
    (actor,) = actors
    total = sum(each.num_gpus for each in models)
    wanted = _actor_keys(actor)
    name = _get(values, NAME_KEY)
    # After a wrong name any model but the policy: the rules about a missing one would report a second problem.
    reward = next((each for each in models if each is not actor and (each.name == name or named)), None)
    if reward is not None:
        wanted |= {f"reward.engine.{key}": value for key, value in _frozen_keys(reward).items()}
        wanted.setdefault("reward.engine.hf_checkpoint", checkpoint)  # without a path: the model of the run
    others = {each.name: _frozen_keys(each) for each in models if each not in (actor, reward)}
    if others:
        wanted[MODELS_KEY] = others
    problems = named
    for key, value in wanted.items():
        given = _get(values, key)
        # slime counts the GPUs of all models, a resolved config those of the rollout engines.
        is_total = key == "cluster.rollout_num_gpus" and given == total
        is_argument = key.startswith("sglang.")  # slime: the file has priority
        if is_given(key) and given not in (None, value) and not is_total and not is_argument:
            rule = f"be {show(value)}, as {path} says, or not be set with {KEY}"
            problems.append(Problem(path=key, rule=rule, value=show(given), fix="remove one of them"))
        # Also after a problem, so that rules about the key report no second one.
        _set(values, key, value)
    return problems


def read_engine_file(path: str) -> list[EngineModel]:
    """Reads and checks the file of `sglang.config`.

    Raises:
        ConfigError: the file cannot be used; lists all its problems.
    """
    try:
        content: Any = load_yaml(read_yaml_text(Path(os.path.expanduser(path))))
        json.dumps(content, default=str)  # a value that contains itself cannot be shown
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError([_problem("name a readable YAML file", path, text)]) from error
    entries = content.get("sglang") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError([_problem("name a file with sglang, a list of models", path, _FORM)])
    problems: list[Problem] = []
    models = [_read_model(path, f"sglang[{i}]", entry, problems) for i, entry in enumerate(entries)]
    names = [each.name for each in models if each is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(_problem("give each model a unique name", f"{name} twice in {path}", "rename one"))
    if problems:
        raise ConfigError(problems)
    return [each for each in models if each is not None]


def _read_model(path: str, place: str, entry: Any, problems: list[Problem]) -> EngineModel | None:
    """A model, or None after adding its problems to `problems`."""
    before = len(problems)
    if not isinstance(entry, Mapping):
        problems.append(_problem(f"have a mapping as {place}", f"{show(entry)} in {path}", _FORM))
        return None
    problems += _unknown(path, place, entry, _MODEL_KEYS)
    kinds = {"name": (str, True), "model_path": (str, False), "update_weights": (bool, False)}
    for key, (kind, is_required) in kinds.items():
        value = entry.get(key)
        if (value is None and is_required) or (value is not None and (not isinstance(value, kind) or value == "")):
            word = "a string" if kind is str else "true or false"
            problems.append(_problem(f"have {word} as {place}.{key}", f"{show(value)} in {path}", "correct it"))
    default = _positive(path, f"{place}.num_gpus_per_engine", entry.get("num_gpus_per_engine"), problems)
    name = "engine_groups" if "engine_groups" in entry and "server_groups" not in entry else "server_groups"
    groups = entry.get(name)
    if not isinstance(groups, list) or not groups:
        problems.append(_problem(f"have a list as {place}.{name}", f"{show(groups)} in {path}", _FORM))
        return None
    read = [_read_group(path, f"{place}.{name}[{i}]", group, default, problems) for i, group in enumerate(groups)]
    if len(problems) > before:
        return None
    wrong = _find_unequal(path, f"{place}.{name}", read)
    if wrong is not None:
        problems.append(wrong)
        return None
    shared = {
        key: value
        for key, value in read[0].overrides.items()
        if all(key in each.overrides and each.overrides[key] == value for each in read)
    }
    return EngineModel(
        name=entry["name"],
        model_path=entry.get("model_path") or shared.get("model_path"),
        update_weights=entry.get("update_weights"),
        num_gpus=sum(each.num_gpus for each in read),
        num_gpus_per_engine=None if _have_sizes(read) else read[0].num_gpus_per_engine,
        overrides={key: value for key, value in shared.items() if key != "model_path"},
        groups=tuple(_join_groups(role, read, shared) for role in ServerRole if read[0].role is not None),
    )


def _find_unequal(path: str, place: str, groups: Sequence[_Group]) -> Problem | None:
    """The problem of groups of one model that a run cannot serve together."""
    roles = {each.role for each in groups}
    if len(roles) > 1 and None in roles:
        fix = "write regular for all groups, or prefill and decode"
        return _problem(f"have either regular or prefill and decode groups in {place}", f"both in {path}", fix)
    if len(roles) == 1 and None not in roles:
        (other,) = set(ServerRole) - roles
        fix = f"add a group with worker_type: {other}, or write regular"
        return _problem(f"have a prefill and a decode group in {place}", f"no {other} group in {path}", fix)
    for role in roles:
        kind = "engines" if role is None else f"{role} engines"
        if len({each.num_gpus_per_engine for each in groups if each.role == role}) > 1:
            fix = "give all of them the same num_gpus_per_engine"
            return _problem(f"have {kind} of one size in {place}", f"different num_gpus_per_engine in {path}", fix)
        alike = [each.overrides for each in groups if each.role == role]
        if any(each != alike[0] for each in alike):
            rule = f"have equal groups in {place}" if role is None else f"have equal {role} groups in {place}"
            return _problem(rule, f"different ones in {path}", "give all of them the same overrides")
    return None


def _have_sizes(groups: Sequence[_Group]) -> bool:
    """Whether prefill and decode engines have different sizes."""
    return len({each.num_gpus_per_engine for each in groups}) > 1


def _join_groups(role: ServerRole, groups: Sequence[_Group], shared: Mapping[str, Any]) -> _Group:
    """All groups of a role as one, with the arguments that the other role has not, and a size that it has not."""
    own = [each for each in groups if each.role == role]
    arguments = {key: value for key, value in own[0].overrides.items() if key not in shared}
    size = own[0].num_gpus_per_engine if _have_sizes(groups) else None
    num_gpus = sum(each.num_gpus for each in own)
    return _Group(role=role, num_gpus=num_gpus, num_gpus_per_engine=size, overrides=arguments)


def _read_group(path: str, place: str, group: Any, default: int | None, problems: list[Problem]) -> _Group:
    """A server group; its problems are added to `problems`."""
    if not isinstance(group, Mapping):
        problems.append(_problem(f"have a mapping as {place}", f"{show(group)} in {path}", _FORM))
        group = {"worker_type": "regular", "num_gpus": 1}
    problems += _unknown(path, place, group, _GROUP_KEYS)
    kind = group.get("worker_type")
    if kind not in ("regular", *ServerRole):
        fix = _REFUSED_TYPES.get(kind, "write worker_type: regular") if isinstance(kind, str) else "add it"
        rule = f"have regular, prefill or decode as {place}.worker_type"
        problems.append(_problem(rule, f"{show(kind)} in {path}", fix))
    overrides = group.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        rule = f"have a mapping as {place}.overrides"
        problems.append(_problem(rule, f"{show(overrides)} in {path}", "write `argument: value` pairs"))
        overrides = {}
    num_gpus = _positive(path, f"{place}.num_gpus", group.get("num_gpus"), problems, is_required=True)
    own = _positive(path, f"{place}.num_gpus_per_engine", group.get("num_gpus_per_engine"), problems)
    per_engine = own or default
    if num_gpus and per_engine and num_gpus % per_engine:
        fix = f"set it to {-(-num_gpus // per_engine) * per_engine}"
        rule = f"have a multiple of num_gpus_per_engine={per_engine} as {place}.num_gpus"
        problems.append(_problem(rule, f"{num_gpus} in {path}", fix))
    role = ServerRole(kind) if kind in list(ServerRole) else None
    return _Group(role=role, num_gpus=num_gpus or 1, num_gpus_per_engine=per_engine, overrides=overrides)


def _positive(path: str, place: str, value: Any, problems: list[Problem], *, is_required: bool = False) -> int | None:
    if value is None and not is_required:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(_problem(f"have a number of at least 1 as {place}", f"{show(value)} in {path}", "correct it"))
    return None


def _actor_problems(path: str, actors: Sequence[EngineModel], checkpoint: Any) -> list[Problem]:
    """Exactly one model, that of the run, gets the weights of the trainer."""
    if len(actors) != 1:
        names = ", ".join(each.name for each in actors) or "none"
        fix = "set update_weights: true for the policy and false for all others, or their model_path"
        return [_problem("have one model whose weights are updated", f"{names} in {path}", fix)]
    (actor,) = actors
    if actor.model_path in (None, checkpoint):
        return []
    fix = f"set model.hf_checkpoint={actor.model_path}, or remove model_path"
    rule = f"have model.hf_checkpoint={show(checkpoint)} as model_path of {actor.name}, whose weights are updated"
    return [_problem(rule, f"{actor.model_path} in {path}", fix)]


def _reward_problems(
    path: str, models: Sequence[EngineModel], actors: Sequence[EngineModel], values: Mapping[str, Any]
) -> list[Problem]:
    """`reward.engine.name` names a frozen model."""
    frozen = [each.name for each in models if each not in actors]
    name = _get(values, NAME_KEY)
    if name is not None and name not in frozen:
        near = nearest(str(name), frozen)
        is_actor = name in [each.name for each in actors]
        fix = f"did you mean {near}?" if near else f"name one of {', '.join(frozen)}" if frozen else "remove it"
        rule = f"name a model of {path} whose weights are " + ("not updated" if is_actor else "frozen")
        return [Problem(path=NAME_KEY, rule=rule, value=show(name), fix=fix)]
    return []


def _group_problems(
    path: str, models: Sequence[EngineModel], actors: Sequence[EngineModel], values: Mapping[str, Any]
) -> list[Problem]:
    """Only the policy has prefill and decode groups, with arguments that SGLang has."""
    fix = "write worker_type: regular; the router pairs the servers of the policy only"
    problems = [
        _problem(f"have regular groups for {each.name}, whose weights are not updated", f"prefill in {path}", fix)
        for each in models
        if each.groups and each not in actors
    ]
    for group in (group for each in actors for group in each.groups):
        given = {f"sglang.{name}": value for name, value in group.overrides.items()}
        found = check_passthrough(given, values, lambda key: "")
        problems += [
            replace(each, value=f"{each.value} for {group.role} servers in {path}", origin=KEY)
            for each in found.problems
        ]
    return problems


def _actor_keys(actor: EngineModel) -> dict[str, Any]:
    keys: dict[str, Any] = {"cluster.rollout_num_gpus": actor.num_gpus}
    keys[GROUPS_KEY] = {
        str(each.role): {
            "num_gpus": each.num_gpus,
            **({} if each.num_gpus_per_engine is None else {SIZE: each.num_gpus_per_engine}),
            "server_args": dict(each.overrides),
        }
        for each in actor.groups
    }
    if actor.num_gpus_per_engine is not None:
        keys["cluster.rollout_num_gpus_per_engine"] = actor.num_gpus_per_engine
    return keys | {f"sglang.{name}": value for name, value in actor.overrides.items()}


def _frozen_keys(model: EngineModel) -> dict[str, Any]:
    arguments = dict(model.overrides)
    keys: dict[str, Any] = {"num_gpus": model.num_gpus}
    for key, value in (
        ("num_gpus_per_engine", model.num_gpus_per_engine),
        ("hf_checkpoint", model.model_path),
        ("is_embedding", arguments.pop("is_embedding", None)),
        ("max_context_len", arguments.pop("context_length", None)),
        ("server_args", arguments or None),
    ):
        if value is not None:
            keys[key] = value
    return keys


def _unknown(path: str, place: str, entry: Mapping[Any, Any], known: Sequence[str]) -> list[Problem]:
    problems = []
    for name in entry:
        if name not in known:
            near = nearest(str(name), known)
            fix = f"did you mean {near}?" if near else f"known keys: {', '.join(known)}"
            problems.append(_problem("contain known keys only", f"{place}.{name} in {path}", fix))
    return problems


def _problem(rule: str, value: str, fix: str) -> Problem:
    return Problem(path=KEY, rule=rule, value=value, fix=fix)


def _get(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        values[group] = dict(values.get(group) or {})
        values = values[group]
    values[name] = value
