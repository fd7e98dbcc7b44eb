"""Export of a model as a folder that transformers loads, from the shards of all ranks."""

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
        folder: created if needed, visible to all ranks.
        source: Hugging Face folder or hub id that provides configuration and tokenizer.
        dtype: written into the configuration.
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
    """Writes the weights into a folder that rank 0 has created; a collective. Returns what each rank has written.

    Each rank writes weights of which it holds a shard, about as many bytes as the others, and keeps one file in memory.
    Rank 0 alone writes weights that fit in one file.
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
    # File names contain the number of files, which is known only now.
    if dist.get_rank() == 0:
        name_files(folder, by_rank)
    dist.barrier()
    return by_rank
