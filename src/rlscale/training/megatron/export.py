"""A folder that transformers loads, from the parts of a model that all ranks hold."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, GenerationConfig

from rlscale.models.hf_models import load_tokenizer
from rlscale.training.megatron.hf_mapping.export_hf import Exporter, make_exporter
from rlscale.training.megatron.hf_mapping.hf_writer import MAX_FILE_BYTES, HfWriter, WrittenFiles, name_files
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.spec import WeightOwners


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


def write_weights(model: MegatronModel, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> list[WrittenFiles]:
    """Writes the weights into a folder that rank 0 has made; a collective. Returns what each rank has written.

    Each rank writes weights of which it holds a part, about as many bytes as the others, and has one file in memory.
    Weights that fit in one file are written by rank 0 alone.
    """
    exporter = make_exporter(model)
    if isinstance(exporter, Exporter) and exporter.num_bytes > max_file_bytes:
        exporter = make_exporter(model, to=WeightOwners.holders)
    dist.barrier()
    writer = HfWriter(folder=folder, rank=dist.get_rank(), max_file_bytes=max_file_bytes)
    for name, weight in exporter.weights():
        writer.add(name, weight)
    by_rank = [WrittenFiles(files=(), num_bytes=0)] * dist.get_world_size()
    dist.all_gather_object(by_rank, writer.finish())
    if dist.get_rank() == 0:
        name_files(folder, by_rank)
    dist.barrier()
    return by_rank
