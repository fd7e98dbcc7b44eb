"""A folder that transformers loads, from the parts of a model that all ranks hold."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, GenerationConfig

from rlscale.models import load_tokenizer
from rlscale.training.megatron.hf_folder import HfWriter, Written, name_files
from rlscale.training.megatron.model import MegatronModel
from rlscale.training.megatron.names.export import export_hf


def write_hf(model: MegatronModel, folder: Path, *, source: str, dtype: torch.dtype) -> None:
    """Writes weights, configuration and tokenizer; a collective.

    Args:
        model: its parameters are of `dtype`.
        folder: made if needed, seen by all ranks.
        source: Hugging Face folder or hub id that configuration and tokenizer are taken from.
        dtype: named by the configuration.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        config = AutoConfig.from_pretrained(source)
        config.dtype = dtype
        config.save_pretrained(folder)
        if not Path(source).is_dir() or (Path(source) / "generation_config.json").exists():
            GenerationConfig.from_pretrained(source).save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)
    write_weights(model, folder)


def write_weights(model: MegatronModel, folder: Path) -> list[Written]:
    """Writes the weights into a folder that rank 0 has made; a collective. Returns what each rank has written.

    Each rank writes weights of which it holds a part, about as many bytes as the others, and has one file in memory.
    """
    dist.barrier()
    writer = HfWriter(folder=folder, rank=dist.get_rank())
    for name, weight in export_hf(model, is_spread=True):
        writer.add(name, weight)
    everywhere = [Written(files=(), num_bytes=0)] * dist.get_world_size()
    dist.all_gather_object(everywhere, writer.finish())
    if dist.get_rank() == 0:
        name_files(folder, everywhere)
    dist.barrier()
    return everywhere
