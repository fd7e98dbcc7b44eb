"""A Hugging Face folder into what the engine needs, without importing transformers where that is not needed.

Importing transformers' model code takes longer (1.7 s was measured) than everything else at the start of the server.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from rlscale.engines.embedded.decoder import Decoder
from rlscale.models.batch_shapes import cache_length
from rlscale.models.decoder_config import DecoderConfig

BYTES_PER_THREAD = 4 << 20
LoadModel = Callable[[str], tuple[Mapping[str, Any], Mapping[str, Tensor]]]


class FolderCodec:
    """Text and ids by the folder's tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def open_codec(folder: Path) -> FolderCodec | None:
    """The tokenizer of a folder, or None where it has none."""
    path = folder / "tokenizer.json"
    return FolderCodec(path) if path.is_file() else None


def read_folder(model_path: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]] | None:
    """config.json and all tensors of a folder of safetensors files; None when `model_path` is something else."""
    folder = Path(model_path)
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        return None
    config = json.loads((folder / "config.json").read_text())
    return config, {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_decoder(
    model_path: str, load_model: LoadModel, *, dtype: torch.dtype, device: torch.device, max_context_len: int | None
) -> tuple[Decoder, int]:
    """The decoder of a model and its longest context. `load_model` serves what is not a plain folder.

    Raises ValueError naming what this engine does not run.
    """
    config_json, weights = read_folder(model_path) or load_model(model_path)
    config = DecoderConfig.from_config_json(config_json)
    limit = config.max_positions if max_context_len is None else max_context_len
    if limit > config.max_positions:
        raise ValueError(
            f"max_context_len must be at most {config.max_positions}, the positions of {model_path}, got {limit}"
        )
    decoder = Decoder(config, weights, dtype=dtype, device=device, num_positions=cache_length(limit))
    return decoder, limit


def useful_threads(weights: Iterable[Tensor], *, most: int) -> int:
    """How many threads gain time where every step reads all weights: one for each few megabytes.

    With 0.8 million parameters a second one took a tenth off a step on a machine that did nothing else; beside the
    server's own thread and the driver, which want the other core, it cost as much. With 3 million it gains a tenth.
    """
    num_bytes = sum(weight.nbytes for weight in weights)
    return max(1, min(most, -(-num_bytes // BYTES_PER_THREAD)))


def eos_ids(model_path: str, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json, config.json and the tokenizer, as SGLang takes them."""
    folder = Path(model_path)
    found = [config.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.is_file():
        found.append(json.loads(generation.read_text()).get("eos_token_id"))
    tokenizer, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if tokenizer.is_file() and settings.is_file():
        token = json.loads(settings.read_text()).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        found.append(Tokenizer.from_file(str(tokenizer)).token_to_id(text) if text else None)
    flat = [i for entry in found for i in (entry if isinstance(entry, list) else [entry])]
    return frozenset(int(i) for i in flat if i is not None)
