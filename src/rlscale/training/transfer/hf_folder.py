"""A Hugging Face folder that several ranks write together."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils.hub import cached_file

from rlscale.models.hf_models import load_tokenizer
from rlscale.models.image_processor import has_images
from rlscale.training.transfer.hf_writer import MAX_FILE_BYTES, PROCESSOR_FILES, HfWriter, WrittenFiles, name_files

GENERATION_FILE = "generation_config.json"


def write_model_files(folder: Path, *, source: str, dtype: torch.dtype) -> None:
    """Writes configuration and tokenizer on rank 0, into a folder that is created if needed.

    Args:
        folder: visible to all ranks.
        source: Hugging Face folder or hub id that provides configuration and tokenizer.
        dtype: written into the configuration.
    """
    if dist.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(source)
    config.dtype = dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the source: the weights are written in `dtype`
    config.save_pretrained(folder)
    # Only a download shows whether a hub id has this file, which many models lack.
    if _find_file(source, GENERATION_FILE) is not None:
        GenerationConfig.from_pretrained(source).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    if has_images(source):
        _copy_processors(folder, source)


def _copy_processors(folder: Path, source: str) -> None:
    """Copies the files of image processors as they are: other programs read keys that ours does not."""
    for name in PROCESSOR_FILES:
        found = _find_file(source, name)
        if found is not None:
            shutil.copyfile(found, folder / name)


def _find_file(source: str, name: str) -> Path | None:
    """A file of a Hugging Face folder or hub id; None: it has none."""
    if Path(source).is_dir():
        found = Path(source) / name
        return found if found.is_file() else None
    cached = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if cached is None else Path(cached)


def write_weight_files(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES
) -> list[WrittenFiles]:
    """Writes weights into a folder that rank 0 has created; a collective. Returns what each rank has written.

    Args:
        weights: of this rank; the iterator may be a collective.
        folder: visible to all ranks.
        max_file_bytes: limit of a file; a larger tensor has its own file.
    """
    dist.barrier()
    writer = HfWriter(folder=folder, rank=dist.get_rank(), max_file_bytes=max_file_bytes)
    for name, weight in weights:
        writer.add(name, weight)
    by_rank = [WrittenFiles(files=(), num_bytes=0)] * dist.get_world_size()
    dist.all_gather_object(by_rank, writer.finish())
    # File names contain the number of files, which is known only now.
    if dist.get_rank() == 0:
        name_files(folder, by_rank)
    dist.barrier()
    return by_rank
