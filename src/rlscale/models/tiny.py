"""Small models with random weights, of Qwen and DeepSeek-V3, built on demand and cached."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rlscale.architectures.hf_config import TINY_MODELS
from rlscale.config import ModelConfig
from rlscale.errors import ConfigError, Problem
from rlscale.models.tiny_tokenizer import tiny_vocabulary

FORMAT_VERSION = 3
"""Incremented whenever the same fields would give other files, so that an old cache is not read."""


def build_model(config: ModelConfig, root: Path) -> Path:
    """Returns the folder of the model of `model.build`, with random weights and a character tokenizer, below `root`.

    The same fields and `model.init_seed` always give the same folder; it is built at most once, and is complete as soon
    as it exists, even if several processes build it at the same time.

    Raises:
        ConfigError: the fields contradict each other.
    """
    assert config.build is not None, "called only with model.build"
    fields = _checked_fields(config, TINY_MODELS[config.build])
    key = json.dumps({"format": FORMAT_VERSION, "init_seed": config.init_seed, **fields}, sort_keys=True)
    folder = root / "models" / f"{config.build}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            # Imported here: building a model needs torch, finding one in the cache does not.
            from rlscale.models.random_weights import write_random

            write_random(temporary, fields=fields, init_seed=config.init_seed, build=config.build)
            temporary.chmod(0o755)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _checked_fields(config: ModelConfig, defaults: Mapping[str, int | float | bool]) -> dict[str, int | float | bool]:
    values = {name: getattr(config, name) for name in defaults}
    fields = {name: default if values[name] is None else values[name] for name, default in defaults.items()}
    num_tokens = len(tiny_vocabulary(str(config.build)))
    problems = []
    if fields["vocab_size"] < num_tokens:
        rule = f"be at least {num_tokens}, the size of the character tokenizer"
        problems.append(_problem("vocab_size", rule, fields, "leave it unset"))
    if fields["num_attention_heads"] % fields.get("num_key_value_heads", 1):
        rule = f"be a multiple of model.num_key_value_heads ({fields['num_key_value_heads']})"
        problems.append(_problem("num_attention_heads", rule, fields, "change one of the two"))
    # Rotary embedding pairs dimensions; multi-head latent attention rotates only a part of the head.
    rotated = "head_dim" if "head_dim" in fields else "qk_rope_head_dim"
    if rotated in fields and fields[rotated] % 2:
        problems.append(_problem(rotated, "be even, for the rotary embedding", fields, "e.g. 32"))
    if fields.get("num_experts_per_tok", 0) > fields.get("num_experts", 0):
        rule = f"be at most model.num_experts ({fields['num_experts']})"
        problems.append(_problem("num_experts_per_tok", rule, fields, "change one of the two"))
    if problems:
        raise ConfigError(problems)
    return fields


def _problem(key: str, rule: str, fields: dict[str, int | float | bool], fix: str) -> Problem:
    return Problem(path=f"model.{key}", rule=rule, value=str(fields[key]), fix=fix)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames a finished folder, unless another process was first: its folder has the same content."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
