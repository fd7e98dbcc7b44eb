"""Tokenizers and models from Hugging Face folders or hub ids.

Weights are read from safetensors only. transformers is imported inside the functions: with torch it takes 2 s, which
code that only resolves a model's folder must not pay.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlscale.errors import ConfigError, Problem
from rlscale.models.transformers_aliases import register_aliases

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder (without network) or of a hub id.

    Raises:
        ConfigError: transformers cannot read a tokenizer there.
    """
    try:
        return _tokenizer_loader(path)(path, local_files_only=Path(path).is_dir())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([_problem("have a tokenizer", path, error)]) from error


def load_causal_lm(path: str, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """Loads the model of a folder (without network) or of a hub id, on the CPU and in evaluation mode.

    Args:
        path: folder or hub id.
        dtype: type of the weights in memory, whatever the type in the files.
        attn_implementation: name in transformers: sdpa, eager, flash_attention_2.

    Raises:
        ConfigError: transformers cannot read it, or a weight or the package of the attention is missing.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register_aliases()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would break the run's own display
    info: dict[str, Any]
    model: PreTrainedModel
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=Path(path).is_dir(),
            use_safetensors=True,
            output_loading_info=True,
        )  # type: ignore[misc]  # annotated without output_loading_info
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([_problem("be a checkpoint that transformers can load", path, error)]) from error
    except ImportError as error:
        fix = f"{' '.join(str(error).split())}; or use sdpa, with the flash attention that comes with torch"
        rule, value = "be an attention implementation whose package is installed", attn_implementation
        raise ConfigError([Problem(path="fsdp.attn_implementation", rule=rule, value=value, fix=fix)]) from error
    if info["missing_keys"]:
        # transformers would continue with random weights.
        missing = sorted(info["missing_keys"])
        text = f"{len(missing)} weights are missing, the first is {missing[0]}"
        raise ConfigError([_problem("contain every weight of its architecture", path, text)])
    return model


def _tokenizer_loader(path: str) -> Callable[..., PreTrainedTokenizerBase]:
    """Returns the loader of the class that `path` names; the plain one avoids AutoTokenizer, which imports torch."""
    file = Path(path) / "tokenizer_config.json"
    if file.is_file() and (Path(path) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        if json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") == PreTrainedTokenizerFast.__name__:
            return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


def _problem(rule: str, path: str, cause: Exception | str) -> Problem:
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    return Problem(path="model.hf_checkpoint", rule=rule, value=repr(path), fix=" ".join(text.split()))
