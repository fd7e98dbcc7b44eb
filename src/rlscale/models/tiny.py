"""Small Qwen3 models with random weights, made on the spot and kept in a cache."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from rlscale.config import ModelConfig
from rlscale.errors import ConfigError, Problem
from rlscale.models.characters import VOCABULARY

FORMAT_VERSION = 2
"""Raised whenever the same figures would give other files, so that an old cache is not read."""

DEFAULTS: dict[str, int | bool] = {
    "num_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rotary_base": 10_000,
}


def build_tiny_qwen3(config: ModelConfig, root: Path) -> Path:
    """The folder of a Qwen3 model with random weights and a character tokenizer, below `root`.

    The same figures and `model.init_seed` always give the same folder; it is made at most once, and is complete as soon
    as it exists, also when several processes make it at the same time.

    Raises:
        ConfigError: figures that do not go together.
    """
    figures = _figures(config)
    key = json.dumps({"format": FORMAT_VERSION, "init_seed": config.init_seed, **figures}, sort_keys=True)
    folder = root / "models" / f"tiny_qwen3-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            # Imported here: torch is needed to make a model, not to find one that was made.
            from rlscale.models.qwen3 import write_qwen3

            write_qwen3(temporary, figures=figures, init_seed=config.init_seed)
            temporary.chmod(0o755)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _figures(config: ModelConfig) -> dict[str, int | bool]:
    given = {name: getattr(config, name) for name in DEFAULTS}
    figures = {name: default if given[name] is None else given[name] for name, default in DEFAULTS.items()}
    num_tokens = len(VOCABULARY)
    figures["vocab_size"] = num_tokens if config.vocab_size is None else config.vocab_size
    problems = []
    if figures["vocab_size"] < num_tokens:
        rule = f"be at least {num_tokens}, the tokens of the character tokenizer"
        problems.append(_problem("vocab_size", rule, figures, "leave it unset"))
    if figures["num_attention_heads"] % figures["num_key_value_heads"]:
        rule = f"be a multiple of model.num_key_value_heads ({figures['num_key_value_heads']})"
        problems.append(_problem("num_attention_heads", rule, figures, "change one of the two"))
    if figures["head_dim"] % 2:
        problems.append(_problem("head_dim", "be even, for the rotary embedding", figures, "e.g. 32"))
    if problems:
        raise ConfigError(problems)
    return figures


def _problem(key: str, rule: str, figures: dict[str, int | bool], fix: str) -> Problem:
    return Problem(path=f"model.{key}", rule=rule, value=str(figures[key]), fix=fix)


def _publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name, unless another process was first: its folder has the same content."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
