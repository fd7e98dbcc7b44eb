"""The arguments of SGLang's server: names and types of those that `sglang.<name>` hands on.

Those of the tested version lie beside this file, written by `engines/sglang_side/describe.py`. Where another version is
installed it is asked itself, once; the answer is kept in the cache folder, because it takes SGLang's import.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlscale.config.sglang_python import TIMEOUT_S, find_python, foreign_environment, look_into

RECORDED = Path(__file__).with_name("sglang_arguments.json")
DESCRIBE = Path(__file__).parents[1] / "engines" / "sglang_side" / "describe.py"

_EACH_SERVER = "leave it out: rlscale gives every server its own"
_PLACED = "leave it out: the cluster.* keys place the engines"
OURS: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "set model.hf_checkpoint",
        "dtype": "set train.dtype, which trainer and engine share",
        "device": "set cluster.device",
        "random_seed": "set rollout.seed",
        "context_length": "set rollout.max_context_len",
        "tp_size": "set cluster.rollout_num_gpus_per_engine, the GPUs of one engine",
        "enable_memory_saver": "set cluster.colocate",
        "host": _EACH_SERVER,
        "port": _EACH_SERVER,
        "nccl_port": _EACH_SERVER,
        "api_key": _EACH_SERVER,
        "weight_version": "leave it out: the trainer counts its updates",
        "skip_server_warmup": "leave it out: the first rollout is the warm-up",
        "nnodes": _PLACED,
        "node_rank": _PLACED,
        "dist_init_addr": _PLACED,
        "base_gpu_id": _PLACED,
        "gpu_id_step": _PLACED,
        "use_ray": _PLACED,
        "custom_sigquit_handler": "leave it out: it is no plain value",
    }
)
"""Arguments that rlscale sets, and what to do instead of setting them."""

_WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "dict": "a mapping",
    "null": "null",
    "any": "any value",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArguments:
    """Types by name, as the text that describe.py makes, e.g. `list[int]|null`."""

    version: str
    types: Mapping[str, str]


def known_arguments(python: str | None) -> ServerArguments:
    """The arguments of the SGLang that `sglang.python` has; those of the tested version where none is installed."""
    recorded = _recorded()
    interpreter = find_python(python)
    try:
        version = look_into(interpreter).sglang
        if version is None or version == recorded.version:
            return recorded
        return _ask(interpreter, version)
    except (OSError, subprocess.SubprocessError, ValueError):
        return recorded  # that it cannot be used is reported where it is needed


def _ask(interpreter: Path, version: str) -> ServerArguments:
    root = os.environ.get("RLSCALE_CACHE")
    folder = Path(root) if root else Path.home() / ".cache" / "rlscale"
    kept = folder / f"sglang_arguments-{version}.json"
    if not kept.exists():
        done = subprocess.run(
            [str(interpreter), str(DESCRIBE)],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
            env=foreign_environment(os.environ),
        )
        _parse(done.stdout)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_text(done.stdout, encoding="utf-8")
        temporary.replace(kept)
    return _parse(kept.read_text(encoding="utf-8"))


@cache
def _recorded() -> ServerArguments:
    return _parse(RECORDED.read_text(encoding="utf-8"))


def _parse(text: str) -> ServerArguments:
    raw = json.loads(text)
    return ServerArguments(version=raw["version"], types=MappingProxyType(raw["types"]))


def fits(value: Any, type_text: str) -> bool:
    """Whether a plain value is of a type that describe.py wrote."""
    return any(_fits_one(value, kind) for kind in _alternatives(type_text))


def in_words(type_text: str) -> str:
    """`list[int]|null` -> `a list (of an integer) or null`."""
    kinds = _alternatives(type_text)
    choices = [json.loads(kind) for kind in kinds if _is_choice(kind)]
    words = [f"one of {'|'.join(map(str, choices))}"] if choices else []
    for kind in kinds:
        if kind.startswith("list["):
            words.append(f"a list (of {in_words(kind[5:-1])})")
        elif not _is_choice(kind):
            words.append(_WORDS[kind])
    return " or ".join(words)


def _fits_one(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(fits(item, kind[5:-1]) for item in value)
    if _is_choice(kind):
        return bool(value == json.loads(kind)) and not isinstance(value, bool)
    match kind:
        case "any":
            return True
        case "null":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "dict":
            return isinstance(value, dict)
    raise ValueError(f"a type of SGLang's arguments must be one that describe.py writes, got {kind!r}")


def _is_choice(kind: str) -> bool:
    return kind.startswith('"') or kind.lstrip("-").isdigit()


def _alternatives(type_text: str) -> list[str]:
    """Parts between the `|` that stand outside of brackets."""
    parts, depth = [""], 0
    for character in type_text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
