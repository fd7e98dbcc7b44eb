"""A folder that transformers loads, from weights under the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from rlscale.models import load_tokenizer
from rlscale.training.megatron.hf_folder import HfWriter


def write_hf(weights: Iterator[tuple[str, Tensor]], folder: Path, *, source: str, dtype: torch.dtype) -> None:
    """Writes weights, configuration and tokenizer; a collective. Rank 0 writes, and holds one file at a time.

    Args:
        weights: full ones; a collective on each item.
        folder: made if needed, seen by rank 0.
        source: Hugging Face folder or hub id that configuration and tokenizer are taken from.
        dtype: of the weights.
    """
    is_writer = dist.get_rank() == 0
    writer = HfWriter(folder=folder)
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    for name, weight in weights:
        if is_writer:
            writer.add(name, weight)
    if is_writer:
        writer.close()
        config = AutoConfig.from_pretrained(source)
        config.dtype = dtype
        config.save_pretrained(folder)
        if not Path(source).is_dir() or (Path(source) / "generation_config.json").exists():
            GenerationConfig.from_pretrained(source).save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)
    dist.barrier()
