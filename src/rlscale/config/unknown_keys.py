"""The key that an unknown name most likely stands for: misspelt, in the wrong group, a flag, or of another project."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from rapidfuzz.distance import OSA

from rlscale.config.foreign_words import find_foreign, foreign_keys, meaning_of
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.keys import keys, nodes
from rlscale.config.passthrough import megatron_args, sglang_args, sglang_renames
from rlscale.config.passthrough.recorded import read_recorded
from rlscale.config.problems import nearest, show
from rlscale.errors import Problem

_LAST_GROUPS = ("eval", "critic", "router", "gateway", "agent", "megatron", "reward", "sandbox", "debug", "buffer")
"""Groups that a name without a group rarely means: their names repeat those of other groups."""

_OWN_FILE = (
    "write --config-dir <folder> and experiment=<name> on a command line, for <folder>/experiment/<name>.yaml; "
    "`rlscale-migrate <file>` translates a file of verl or TRL"
)
_RAY_CPUS = "start Ray yourself, `ray start --head --num-cpus <number>`, and set cluster.ray_address=auto"
_NO_KEY: Mapping[str, str] = MappingProxyType(
    {
        "megatron_config_path": "run `rlscale-migrate <script>`, which writes as keys what slime's file has for each "
        "role",
        **dict.fromkeys(("config", "config_file", "config_yaml", "cfg_file"), _OWN_FILE),
        **dict.fromkeys(("num_cpus", "ray_init.num_cpus", "ray_kwargs.ray_init.num_cpus"), _RAY_CPUS),
    }
)
"""Argument of another project that no key has -> the advice."""


def nearest_key(path: str) -> str | None:
    """The known key that `path` most likely stands for.

    Handles misspelt paths (`algo.eps_clp`), keys without or with a wrong group (`eps_clip`, `optim.eps_clip`), names in
    the style of command-line flags (`--rollout-batch-size`), and names of other projects (`learning_rate`).
    """
    return nearest_target(path)[0]


def nearest_target(path: str) -> tuple[str | None, str | None]:
    """Like `nearest_key`, with the only value that says the same: `disable_x` is `x=false`. None: any value."""
    # slime has this flag for Megatron; elsewhere the word means the type of the weights, with either backend.
    if path == "--bf16":
        return "megatron.bf16", None
    wanted = _as_name(path)
    if wanted in keys():
        return wanted, None
    if advice_without_key(path):
        return None, None
    # One edit from a full path is a misspelt key, even if its last part is also the name of another project.
    found = nearest(wanted, keys(), limit=1) if "." in wanted else None
    target = found or _end_that_is_a_key(wanted) or _foreign(wanted) or _argument_of_library(wanted)
    target = target or _same_name(wanted) or _similar(wanted)
    key, equals, value = (target or "").partition("=")
    return key or None, value if equals else None


def _as_name(path: str) -> str:
    """A flag as a name: `rollout_batch_size` of `--rollout-batch-size`."""
    return path.lstrip("-").replace("-", "_").lower()


def _end_that_is_a_key(wanted: str) -> str | None:
    """`rollout.temperature` of `actor_rollout_ref.rollout.temperature`, and `logging.wandb.key` for `wandb.key`."""
    if "." not in wanted:
        return None
    parts = wanted.split(".")
    ends = (".".join(parts[start:]) for start in range(1, len(parts) - 1))
    found = next((end for end in ends if end in keys() and find_foreign(wanted) is None), None)
    inside = [path for path in keys() if path.endswith(f".{wanted}")]
    # The end of several paths decides nothing.
    return found or (inside[0] if len(inside) == 1 else None)


def _foreign(wanted: str) -> str | None:
    """The target of a word of another project: in the group that was written, if that has a key of the name."""
    target = find_foreign(wanted)
    # verl has its held-out files in `data`, next to those of training.
    if target is None or target.startswith("eval."):
        return target
    own = f"{wanted.partition('.')[0]}.{target.rpartition('.')[2]}"
    return own if own.partition("=")[0] in keys() else target


def _argument_of_library(wanted: str) -> str | None:
    """`sglang.<name>` of the flag `--sglang-<name>`, and the key of a Megatron argument."""
    prefix, _, argument = wanted.partition("_")
    if prefix == "sglang" and argument and f"sglang.{argument}" not in keys():
        present = sglang_renames.RENAMED.get(argument, argument)
        if present in sglang_args.RESERVED:
            return _key_to_set(sglang_args.RESERVED[present])
        return f"sglang.{present}" if present in read_recorded(sglang_args.RECORDED).types else None
    name = wanted.rpartition(".")[2]
    if name in megatron_args.RESERVED:
        return _key_to_set(megatron_args.RESERVED[name])
    if _keys_named(name) or name not in read_recorded(megatron_args.RECORDED).types:
        return None
    return f"megatron.{name}"


def _key_to_set(advice: str) -> str | None:
    """The key of the advice "set <key>", with or without an explanation behind it."""
    found = re.match(r"set ([\w.]+)", advice)
    return found[1] if found and found[1] in keys() else None


def _same_name(wanted: str) -> str | None:
    """The key whose name is right and whose group is missing or wrong."""
    group, _, name = wanted.rpartition(".")
    named = _keys_named(name)
    if not named:
        return None
    close = min(named, key=lambda path: OSA.distance(group, path.rpartition(".")[0]))
    if group and OSA.distance(group, close.rpartition(".")[0]) <= max(2, len(group) // 2):
        return close
    # min keeps the order of the groups, in which a run uses them.
    return min(named, key=lambda path: path.partition(".")[0] in _LAST_GROUPS)


def _similar(wanted: str) -> str | None:
    """The key with the fewest edits, by its path, its name or the flag of it."""
    name = wanted.rpartition(".")[2]
    found = nearest(wanted, keys())
    if found or "." in wanted:
        by_name = nearest(name, [key.name for key in keys().values()])
        return found or (_same_name(by_name) if by_name else None) or _near_word(name)
    by_name = nearest(name, [form for key in keys().values() for form in (key.name, key.path.replace(".", "_"))])
    return _same_name(by_name) if by_name else _near_word(name)


def _near_word(name: str) -> str | None:
    """The target of a misspelt name of another project."""
    word = nearest(name, foreign_keys(), limit=1) if len(name) > 3 else None
    return foreign_keys()[word] if word else None


@cache
def _names() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in keys().values():
        for form in dict.fromkeys((key.name, key.flag, key.path.replace(".", "_"))):
            found.setdefault(form, []).append(key.path)
    return found


def _keys_named(name: str) -> list[str]:
    return _names().get(name, [])


def advice_without_key(path: str) -> str | None:
    """The advice for an argument of another project, or of SGLang, that no key has; None for all others."""
    wanted = _as_name(path)
    reserved = sglang_args.RESERVED.get(wanted.removeprefix("sglang_"), "") if wanted.startswith("sglang_") else ""
    return _NO_KEY.get(wanted) or (reserved if reserved and _key_to_set(reserved) is None else None)


def note(path: str) -> str:
    """The difference in meaning between a word of another project and the suggested key, as a further sentence."""
    text = meaning_of(path)
    return f" {text[0].upper()}{text[1:]}" if text else ""


def from_model(path: str) -> str:
    """Advice about an argument of Megatron that the model decides; empty for every other name."""
    name = path.lstrip("-").replace("-", "_").lower().removeprefix("megatron.")
    return megatron_args.FROM_MODEL if name in megatron_args.OF_MODEL else ""


def is_misspelt_group(path: str, value: Mapping[str, Any]) -> bool:
    """Whether a section has a name like that of a group, and contains a key of that group or nothing."""
    group = nearest(path, nodes())
    inside = [f"{group}.{name}" for name in value]
    return group is not None and (not inside or any(name in keys() or name in nodes() for name in inside))


def unknown_key(path: str, value: Any, *, origin: str) -> Problem:
    """`path` is not a key of the configuration."""
    if "." not in path and path not in nodes() and path in ConfigFolders.find().groups():
        fix = f"write {path}={show(value)} on a command line"
        # Overlays are in no list of defaults.
        fix += "" if path == "on" else f", or add the entry `{show(value)}` to `defaults` in a file"
        rule = "be selected as an option, not set as a key"
        return Problem(path=path, rule=rule, value=show(value), fix=fix, origin=origin)
    if isinstance(value, Mapping) and is_misspelt_group(path, value):
        fix = f"did you mean {nearest(path, nodes())}?"
        return Problem(path=path, rule="be a known group", value=show(value), fix=fix, origin=origin)
    found, fixed = nearest_target(path)
    # Without the feature that a word turns on, only its key is known.
    meant = found if fixed is None or str(value).lower() == "false" else f"{found}={fixed}"
    fallback = advice_without_key(path) or "rlscale-train --help lists the groups"
    fix = f"did you mean {meant}?{note(path)}" if found else fallback
    fix = from_model(path) or fix
    return Problem(path=path, rule="be a known key", value=show(value), fix=fix, origin=origin)
