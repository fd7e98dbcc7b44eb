"""Full weights of a sharded model, for engines and for transformers. All functions are collectives of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlscale.models.hf_models import load_tokenizer
from rlscale.training.modules.lora import base_name, find_adapters, merge_adapter, save_adapters


@torch.no_grad()
def gather_full_weights(model: nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter in full, in the order of the model, then `persistent_buffers`.

    Each item is a collective of all ranks. A tied output layer is yielded once, under the name of the embedding.
    Adapters are merged into their weights.
    """
    adapters = find_adapters(model)
    for name, parameter in model.named_parameters():
        plain = base_name(name)
        if plain is None:
            continue
        # Cast before the gather: half the bytes in bfloat16.
        adapter = adapters.get(plain)
        weight = parameter.detach().to(dtype) if adapter is None else merge_adapter(parameter, adapter, dtype=dtype)
        yield plain, (weight.full_tensor() if isinstance(weight, DTensor) else weight).contiguous()
    yield from persistent_buffers(model)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields weights that are buffers and not trained, in their own dtype: the bias of DeepSeek-V3's router."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer.detach()


def gather_published_weights(model: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """`gather_full_weights` with the names of published checkpoints, which have a separate matrix for each expert.

    transformers keeps the experts of a layer in one tensor, for one grouped product instead of many small ones.
    """
    for name, weight in gather_full_weights(model, dtype=dtype):
        # Only stacks of experts have three dims. The conversion takes time for each weight, so others skip it.
        parts = revert_weight_conversion(model, {name: weight}) if weight.dim() == 3 else {name: weight}
        for part, tensor in parts.items():
            yield part, tensor.contiguous()


def export_hf(model: nn.Module, folder: Path, *, source: str, dtype: torch.dtype) -> None:
    """Writes a folder that transformers loads, with the adapters alone in its subfolder `adapter`.

    Rank 0 writes, and holds the whole model in host memory.

    Args:
        model: sharded.
        folder: created by rank 0 if needed.
        source: Hugging Face folder or hub id with the configuration and the tokenizer.
        dtype: of the weights in the files.
    """
    weights = {}
    # Every rank iterates: each item is a collective. Only rank 0 keeps the result.
    for name, weight in gather_full_weights(model, dtype=dtype):
        if dist.get_rank() == 0:
            weights[name] = weight.cpu()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _write(weights, folder, source=source, dtype=dtype)
    if find_adapters(model):
        save_adapters(model, folder / "adapter", base=source)
    dist.barrier()


def _write(weights: dict[str, Tensor], folder: Path, *, source: str, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):  # save_pretrained is a method, but its tensors come from `weights`
        shell = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    if shell.can_generate() and _has_generation_config(source):
        shell.generation_config = GenerationConfig.from_pretrained(source)
    shell.save_pretrained(folder, state_dict=weights)
    load_tokenizer(source).save_pretrained(folder)


def _has_generation_config(source: str) -> bool:
    folder = Path(source)
    return not folder.is_dir() or (folder / "generation_config.json").exists()
