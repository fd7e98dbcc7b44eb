"""Loads a decoder from a Hugging Face folder, without transformers if possible.

Importing transformers' model code takes longer (1.7 s measured) than everything else at the start of the server.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.vision_tower import VisionTower
from rlscale.models.batch_shapes import cache_length
from rlscale.models.decoder_config import DecoderConfig

BYTES_PER_THREAD = 4 << 20
LoadModel = Callable[[str], tuple[Mapping[str, Any], Mapping[str, Tensor]]]


class FolderCodec:
    """Converts between text and ids with the tokenizer.json of a folder."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def load_codec(folder: Path) -> FolderCodec | None:
    """Loads the tokenizer of a folder; None if it has none."""
    path = folder / "tokenizer.json"
    return FolderCodec(path) if path.is_file() else None


def read_folder(model_path: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]] | None:
    """Reads config.json and all tensors of a folder of safetensors files; None if `model_path` is something else."""
    folder = Path(model_path)
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        return None
    config = json.loads((folder / "config.json").read_text())
    return config, {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_decoder(
    model_path: str,
    load_model: LoadModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context_len: int | None,
    precision: str | None = None,
) -> tuple[Decoder, int]:
    """Loads the decoder of a model and its maximum context length.

    Args:
        load_model: loads models that are not a folder of safetensors files.
        precision: of the linear layers, which are quantised here. None: `dtype`.

    Raises ValueError for a model that this engine does not support.
    """
    config_json, weights = read_folder(model_path) or load_model(model_path)
    config = DecoderConfig.from_config_json(config_json)
    limit = config.max_positions if max_context_len is None else max_context_len
    if limit > config.max_positions:
        raise ValueError(
            f"max_context_len must be at most {config.max_positions}, the positions of {model_path}, got {limit}"
        )
    decoder = Decoder(
        config, weights, dtype=dtype, device=device, num_positions=cache_length(limit), precision=precision
    )
    if find_family(config_json.get("model_type")).vision is not None:
        tower = VisionTower(config_json, weights, model_path=model_path, dtype=dtype, device=device)
        decoder.add_tower(tower)
    return decoder, limit


def num_useful_threads(weights: Iterable[Tensor], *, max_threads: int) -> int:
    """Number of threads that make a step faster: one for each 4 MiB of weights, since a step reads all of them.

    With 0.8 million parameters a second thread made a step a tenth faster on an idle machine, and as much slower next
    to the HTTP thread and the driver, which need the other core. With 3 million it is a tenth faster.
    """
    num_bytes = sum(weight.nbytes for weight in weights)
    return max(1, min(max_threads, -(-num_bytes // BYTES_PER_THREAD)))


def eos_ids(model_path: str, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json, config.json and the tokenizer, as in SGLang."""
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
    # An entry may be one id or a list of ids.
    flat = [i for entry in found for i in (entry if isinstance(entry, list) else [entry])]
    return frozenset(int(i) for i in flat if i is not None)
