"""Small models with random weights, of Qwen3 and DeepSeek-V3, made on the spot and kept in a cache."""

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
from rlscale.models.char_tokenizer import VOCABULARY

FORMAT_VERSION = 2
"""Raised whenever the same figures would give other files, so that an old cache is not read."""


def build_model(config: ModelConfig, root: Path) -> Path:
    """The folder of the model of `model.build`, with random weights and a character tokenizer, below `root`.

    The same figures and `model.init_seed` always give the same folder; it is made at most once, and is complete as soon
    as it exists, also when several processes make it at the same time.

    Raises:
        ConfigError: figures that do not go together.
    """
    assert config.build is not None, "model.build names what is made"
    figures = _figures(config, TINY_MODELS[config.build])
    key = json.dumps({"format": FORMAT_VERSION, "init_seed": config.init_seed, **figures}, sort_keys=True)
    folder = root / "models" / f"{config.build}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            # Imported here: torch is needed to make a model, not to find one that was made.
            from rlscale.models.random_weights import write_random

            write_random(temporary, figures=figures, init_seed=config.init_seed)
            temporary.chmod(0o755)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _figures(config: ModelConfig, defaults: Mapping[str, int | float | bool]) -> dict[str, int | float | bool]:
    given = {name: getattr(config, name) for name in defaults}
    figures = {name: default if given[name] is None else given[name] for name, default in defaults.items()}
    num_tokens = len(VOCABULARY)
    problems = []
    if figures["vocab_size"] < num_tokens:
        rule = f"be at least {num_tokens}, the tokens of the character tokenizer"
        problems.append(_problem("vocab_size", rule, figures, "leave it unset"))
    if figures["num_attention_heads"] % figures.get("num_key_value_heads", 1):
        rule = f"be a multiple of model.num_key_value_heads ({figures['num_key_value_heads']})"
        problems.append(_problem("num_attention_heads", rule, figures, "change one of the two"))
    rotated = "head_dim" if "head_dim" in figures else "qk_rope_head_dim"
    if figures[rotated] % 2:
        problems.append(_problem(rotated, "be even, for the rotary embedding", figures, "e.g. 32"))
    if figures.get("num_experts_per_tok", 0) > figures.get("num_experts", 0):
        rule = f"be at most model.num_experts ({figures['num_experts']})"
        problems.append(_problem("num_experts_per_tok", rule, figures, "change one of the two"))
    if problems:
        raise ConfigError(problems)
    return figures


def _problem(key: str, rule: str, figures: dict[str, int | float | bool], fix: str) -> Problem:
    return Problem(path=f"model.{key}", rule=rule, value=str(figures[key]), fix=fix)


def _publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name, unless another process was first: its folder has the same content."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
