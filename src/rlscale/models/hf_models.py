"""Tokenizers and models from Hugging Face folders or hub ids.

Weights are read from safetensors only. transformers is imported inside the functions: with torch it takes 2 s, which
code that only resolves a model's folder must not pay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import read_config_json, read_hf_fields
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # e.g. a config.json that is a list
        raise ConfigError([checkpoint_problem("have a tokenizer", path, error)]) from error


def load_hf_fields(path: str) -> dict[str, Any]:
    """The architecture fields of a folder, or of a hub id, whose config.json is downloaded if it is not cached.

    Raises:
        ConfigError: the hub id has no config.json that can be downloaded.
    """
    fields = read_hf_fields(path)
    if fields or Path(path).is_dir():
        return fields
    from transformers.utils.hub import cached_file

    try:
        cached_file(path, "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError([checkpoint_problem("have a config.json", path, error)]) from error
    return read_hf_fields(path)


def load_causal_lm(path: str, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """Loads the model of a folder (without network) or of a hub id, on the CPU and in evaluation mode.

    Args:
        path: folder or hub id.
        dtype: type of the weights in memory, whatever the type in the files.
        attn_implementation: name in transformers: sdpa, eager, flash_attention_2.

    Raises:
        ConfigError: transformers cannot read it, or a weight or the package of the attention is missing.
    """
    from transformers.utils import logging

    register_aliases()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would break the run's own display
    info: dict[str, Any]
    model: PreTrainedModel
    with _explained(path, attn_implementation):
        model, info = auto_model(read_config_json(path).get("model_type")).from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=by_part(path, attn_implementation),
            local_files_only=Path(path).is_dir(),
            use_safetensors=True,
            output_loading_info=True,
        )
    if info["missing_keys"]:
        # transformers would continue with random weights.
        missing = sorted(info["missing_keys"])
        text = f"{len(missing)} weights are missing, the first is {missing[0]}"
        raise ConfigError([checkpoint_problem("contain every weight of its architecture", path, text)])
    return model


def build_causal_lm(path: str, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """Builds the model of a folder or hub id without its weights: parameters are on the meta device.

    Buffers are on the CPU with the values that the model gives them, e.g. the frequencies of the rotary embedding. The
    model is in evaluation mode.

    Args:
        path: folder or hub id; only its config.json is read.
        dtype: of the parameters.
        attn_implementation: name in transformers.

    Raises:
        ConfigError: transformers cannot build it, or the package of the attention is missing.
    """
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers import AutoConfig

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # None keeps the object, so that a tied parameter stays one.
        if parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    register_aliases()
    model: PreTrainedModel
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return one
    try:
        with _explained(path, attn_implementation):
            config = AutoConfig.from_pretrained(path, local_files_only=Path(path).is_dir())
            model = auto_model(config.model_type).from_config(
                config, dtype=dtype, attn_implementation=by_part(path, attn_implementation)
            )
    finally:
        hook.remove()
    model.eval()  # type: ignore[no-untyped-call]
    return model


def auto_model(model_type: object) -> Any:
    """The class of transformers that makes models of a family: those with images are not among its causal ones."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if find_family(model_type).vision else AutoModelForCausalLM


def by_part(path: str, attn_implementation: str) -> str | dict[str, str]:
    """The attention of each part of a model: patches of an image see each other, so packed attention is no choice."""
    if not find_family(read_config_json(path).get("model_type")).vision:
        return attn_implementation
    known = attn_implementation in ("eager", "sdpa") or attn_implementation.startswith("flash")
    # Parts that are not named keep the default of transformers.
    vision = attn_implementation if known else "sdpa"
    return {"": attn_implementation, "text_config": attn_implementation, "vision_config": vision}


@contextmanager
def _explained(path: str, attn_implementation: str) -> Iterator[None]:
    """Turns the errors of transformers into a ConfigError that names the key."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([checkpoint_problem("be a checkpoint that transformers can load", path, error)]) from error
    except ImportError as error:
        fix = f"{' '.join(str(error).split())}; or use sdpa, with the flash attention that comes with torch"
        rule, value = "be an attention implementation whose package is installed", attn_implementation
        raise ConfigError([Problem(path="fsdp.attn_implementation", rule=rule, value=value, fix=fix)]) from error


def _tokenizer_loader(path: str) -> Callable[..., PreTrainedTokenizerBase]:
    """Returns the loader of the class that `path` names; the plain one avoids AutoTokenizer, which imports torch."""
    file = Path(path) / "tokenizer_config.json"
    if file.is_file() and (Path(path) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        if json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") == PreTrainedTokenizerFast.__name__:
            return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


def checkpoint_problem(rule: str, path: str, cause: Exception | str) -> Problem:
    """A problem of the key that names the model."""
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    return Problem(path="model.hf_checkpoint", rule=rule, value=repr(path), fix=" ".join(text.split()))
