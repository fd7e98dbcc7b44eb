"""Tokenizers and models from Hugging Face folders or hub ids.

Weights are read from safetensors only. transformers is imported inside the functions: together with torch it takes two
seconds, which whoever only resolves a model's folder should not pay.
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
    """The tokenizer of a folder (without network) or of a hub id.

    Raises:
        ConfigError: there is none that transformers can read.
    """
    try:
        return _tokenizer_loader(path)(path, local_files_only=Path(path).is_dir())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([_problem("have a tokenizer", path, error)]) from error


def load_causal_lm(path: str, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """The model of a folder (without network) or of a hub id, on the CPU and in evaluation mode.

    Args:
        path: folder or hub id.
        dtype: type of the weights in memory, whatever the files hold.
        attn_implementation: as transformers names it: sdpa, eager, flash_attention_2.

    Raises:
        ConfigError: transformers cannot read it, a weight is missing, or the package of the attention is.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register_aliases()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the terminal belongs to the run's own display
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
        rule, value = "be one whose package is installed", attn_implementation
        raise ConfigError([Problem(path="fsdp.attn_implementation", rule=rule, value=value, fix=fix)]) from error
    if info["missing_keys"]:
        # transformers would go on with random numbers in their place.
        missing = sorted(info["missing_keys"])
        text = f"{len(missing)} weights are missing, the first is {missing[0]}"
        raise ConfigError([_problem("hold every weight of its architecture", path, text)])
    return model


def _tokenizer_loader(path: str) -> Callable[..., PreTrainedTokenizerBase]:
    """The class that `path` names, where it is the plain one: AutoTokenizer imports torch, which takes a second."""
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
