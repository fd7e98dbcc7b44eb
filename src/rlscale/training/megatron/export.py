"""Export of a model as a folder that transformers loads, from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.training.megatron.hf_mapping.adapter_mapping import map_adapters
from rlscale.training.megatron.hf_mapping.export_hf import Exporter, make_exporter
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.modules.lora import write_adapters
from rlscale.training.spec import WeightOwners
from rlscale.training.transfer.hf_folder import write_model_files, write_weight_files
from rlscale.training.transfer.hf_writer import MAX_FILE_BYTES, WrittenFiles


def write_hf(model: MegatronModel, folder: Path, *, source: str, dtype: torch.dtype) -> None:
    """Writes weights, configuration and tokenizer, and the adapters alone in the subfolder `adapter`; a collective.

    Args:
        model: its parameters are of `dtype`.
        folder: created if needed, visible to all ranks.
        source: Hugging Face folder or hub id that provides configuration and tokenizer.
        dtype: written into the configuration.
    """
    write_model_files(folder, source=source, dtype=dtype)
    write_weights(model, folder)
    if model.adapters is not None:
        exporter = Exporter(model, mapped=list(map_adapters(model)))
        write_adapters(exporter.weights(), folder / "adapter", config=model.adapters.peft_config, base=source)


def write_weights(model: MegatronModel, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> list[WrittenFiles]:
    """Writes the weights into a folder that rank 0 has created; a collective. Returns what each rank has written.

    Each rank writes weights of which it holds a shard, about as many bytes as the others. Rank 0 alone writes weights
    that fit in one file.
    """
    exporter = make_exporter(model)
    if isinstance(exporter, Exporter) and exporter.num_bytes > max_file_bytes:
        exporter = make_exporter(model, to=WeightOwners.holders)
    return write_weight_files(_with_copies(exporter.weights(), model), folder, max_file_bytes=max_file_bytes)


def _with_copies(weights: Iterator[tuple[str, Tensor]], model: MegatronModel) -> Iterator[tuple[str, Tensor]]:
    """Repeats tensors as published checkpoints do in layers for multi-token prediction. Engines need no copies."""
    num_mtp, mtp = model.config.mtp_num_layers or 0, find_family(model.architecture.family).mtp
    for name, tensor in weights:
        yield name, tensor
        if mtp is not None:
            for copy in mtp.copies_of(name, num_layers=model.config.num_layers, num_mtp=num_mtp):
                yield copy, tensor
