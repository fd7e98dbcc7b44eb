"""Writes the reference page of the rules between keys, from the rules themselves."""

from __future__ import annotations

import inspect
import json
import operator
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain, combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlscale.architectures.hf_config import CONFIG_NAMES, TINY_MODELS
from rlscale.config import BatchConfig, ModelBuild, RunConfig
from rlscale.config.keys import Key, keys
from rlscale.config.rules import MODULES, RULES, Rule
from rlscale.config.server_groups import SIZE, ServerRole

_INTRODUCTION = """# Rules between keys

Conditions between keys, in addition to the type and the limits of each key. All of them are checked together, before
anything starts. An error shows the value, where it was set, and what to write instead. A rule is skipped if a key that
it reads is wrong by itself.

The rules are small functions in `src/rlscale/config/rules/`; to add a rule, add a function there.
"""

_VALUES: Mapping[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (0, 1, 3, 12),
    float: (0.5, 2.0),
    str: ("a",),
    list[str]: (["a"], ["a", "b"]),
    list[int]: ([1],),
    dict[str, Any]: ({"image": "a"},),
    dict[str, float]: ({"answer": 1.0},),
}
"""Values to try for a key of each type; keys with choices have those instead."""


_SPELLINGS: Mapping[str, str] = {
    "ci": "CI",
    "cuda": "CUDA",
    "dapo": "DAPO",
    "gpus": "GPUs",
    "kl": "KL",
    "kv": "KV",
    "lora": "LoRA",
    "megatron": "Megatron",
    "micro batch": "micro-batch",
    "micro batches": "micro-batches",
    "min p": "`min_p`",
    "mtp": "MTP",
    "off policy": "off-policy",
    "reinforce plus plus": "REINFORCE++",
    "sft": "SFT",
    "sglang": "SGLang",
    "tis": "TIS",
    "top k": "`top_k`",
    "url": "URL",
    "wsd": "WSD",
}
"""Proper names and compounds in the names of rules, and how the page spells them."""


def make_rules_page() -> str:
    """The text of the page, without the line that marks it as generated."""
    parts = [_INTRODUCTION]
    for module in MODULES:
        rules = [rule for rule in RULES if rule.check.__module__ == module.__name__]
        title = (inspect.getdoc(module) or "").splitlines()[0].removesuffix(".")
        parts += [f"## {title}", "", "| rule | keys it reads |", "|---|---|", *map(_row, rules), ""]
    return "\n".join(parts).rstrip() + "\n"


@cache
def keys_read(rule: Rule) -> tuple[str, ...]:
    """Keys that the rule reads in any branch, in the order of the config.

    Which keys a rule reads depends on the values of others. So other values are tried for one and for two of the keys
    that it reads, and a change that makes it read further keys is kept as the start of further changes.
    """
    config = RunConfig(batch=BatchConfig(rollout_batch_size=16))
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        _write_config_json(Path(folder))
        states: list[dict[str, Any]] = [{}]
        for state in states:  # grows while it is read
            read = _trace(rule, config, state)
            found |= read
            singles = list(_changes(read, folder))
            for first, second in chain(((single, {}) for single in singles), combinations(singles, 2)):
                changed = state | first | second
                read = _trace(rule, config, changed)
                if not read <= found:
                    states.append(changed)
                found |= read
    order = {path: place for place, path in enumerate(keys())}
    return tuple(sorted(found, key=lambda path: (order.get(path, len(order)), path)))


def _changes(read: frozenset[str], folder: str) -> Iterator[dict[str, Any]]:
    """Other values of each key, one key at a time; `folder` contains a checkpoint's `config.json`."""
    if "sglang.server_args" in read:
        yield {"sglang.server_args": {"enable_deterministic_inference": True}}
    if "sglang.server_groups" in read:
        for arguments in ({}, {"grpc_mode": True}, {"dp_size": 2, "enable_dp_attention": True}):
            yield {"sglang.server_groups": {role: {"num_gpus": 1, "server_args": arguments} for role in ServerRole}}
        sizes = zip(ServerRole, (2, 4), strict=True)
        yield {"sglang.server_groups": {role: {"num_gpus": 4, SIZE: size, "server_args": {}} for role, size in sizes}}
    if "rollout.sampling_params" in read:
        yield {"rollout.sampling_params": {"logit_bias": {"3": 1.0}, "repetition_penalty": 1.1, "regex": "a"}}
    if "reward.functions" in read:
        for function in ("judge", "math", "dapo", "remote_rm", "my_rewards:style"):
            yield {"reward.functions": {"a": function}}
        yield {"reward.functions": {"a-b": "math"}}
    if "model.model_type" in read:
        yield {"model.model_type": "qwen3_next"}  # no `model.build` has linear attention
    if "reward.weights" in read:
        yield {"reward.weights": {"a": 1.0}}
    if "reward.judge.prompt" in read:
        yield {"reward.judge.prompt": "{response}"}
    for path in sorted(read & keys().keys()):
        key = keys()[path]
        values = tuple(key.type) if key.choices else _VALUES.get(key.type, ())
        if path == "model.hf_checkpoint":
            values = (folder,)
        yield from ({path: value} for value in values if _is_allowed(key, value))
        if key.optional:
            yield {path: None}


def _is_allowed(key: Key, value: Any) -> bool:
    """Whether a value is within the limits of the key; a check may rely on them."""
    limits = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
    return all(
        compare(value, getattr(limit, name))
        for limit in key.constraints
        for name, compare in limits.items()
        if hasattr(limit, name)
    )


def _trace(rule: Rule, config: RunConfig, changes: Mapping[str, Any]) -> frozenset[str]:
    """Keys that the rule reads in the config with other values; restores them."""
    before = {path: attrgetter(path)(config) for path in changes}
    try:
        _set(config, changes)
        return rule.trace(config)[1]
    finally:
        _set(config, before)


def _set(config: RunConfig, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(config) if group else config, name, value)


def _write_config_json(folder: Path) -> None:
    """Writes a `config.json` with every architecture key, so that a rule compares all of them."""
    fields = {names[0]: 1 for names in CONFIG_NAMES.values()}
    fields |= {CONFIG_NAMES[name][0]: value for name, value in TINY_MODELS[ModelBuild.tiny_deepseek_v3].items()}
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "deepseek_v3"}), encoding="utf-8")


def spell_name(name: str) -> str:
    """Spells the name of a rule as the page does: `one_kl_penalty` is "One KL penalty"."""
    words = name.replace("_", " ")
    for plain, spelled in _SPELLINGS.items():
        words = re.sub(rf"\b{plain}\b", spelled, words)
    return words[0].upper() + words[1:]


def _row(rule: Rule) -> str:
    """The name in words, the docstring, and the keys."""
    more = " ".join((inspect.getdoc(rule.check) or "").split())
    listed = ", ".join(f"`{path}`" for path in keys_read(rule))
    return f"| {spell_name(rule.name)}. {more} | {listed} |".replace(".  |", ". |")
