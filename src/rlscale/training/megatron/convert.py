"""Weights between Hugging Face folders and folders of Megatron-core, by one or more ranks.

<folder>/torch_dist/   weights by their place in the whole model, which any parallel sizes can read
<folder>/hf/           configuration and tokenizer

A checkpoint of a trainer has the same `torch_dist`, with the optimiser's state beside the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from rlscale.config import MegatronConfig, ModelConfig
from rlscale.config.groups.model import MegatronToHf
from rlscale.errors import DataError
from rlscale.models.megatron_folder import STATE, torch_dist_folder
from rlscale.training.megatron.checkpoint.dist_checkpoint import InProcessSave, load_weights
from rlscale.training.megatron.checkpoint.safe_pickle import plain_files
from rlscale.training.megatron.cpu_patches import megatron_device
from rlscale.training.megatron.export import write_weights
from rlscale.training.megatron.hf_mapping.hf_writer import copy_beside
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint, load_hf
from rlscale.training.megatron.model.megatron_model import MegatronModel, build_model
from rlscale.training.megatron.parallel_dims import make_grid

BESIDE = "hf"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What a conversion wrote."""

    num_tensors: int
    num_bytes: int


def to_megatron(
    source: str,
    target: Path,
    *,
    sizes: MegatronConfig,
    dtype: torch.dtype | None = None,
    mode: MegatronToHf = MegatronToHf.raw,
) -> Converted:
    """Writes the weights of a Hugging Face folder or hub id into a new folder; a collective of the world.

    Each rank reads and writes the parts that it would have in training with these sizes.

    Args:
        source: with safetensors.
        target: must not exist yet.
        sizes: parallel sizes that divide the world.
        dtype: of the weights; None: the one they have.
        mode: whose maps of names and layouts are taken.

    Raises:
        ConfigError: a model that Megatron-core does not have.
        DataError: weights are missing, or of several types.
    """
    checkpoint = HfCheckpoint(source)
    if dtype is None:
        found = sorted(checkpoint.dtypes())
        if len(found) != 1 or found[0] not in DTYPES:
            rule = f"hold tensors of one type among {', '.join(DTYPES)}"
            raise DataError(f"{source} must {rule}, got {', '.join(found)}; choose one with --dtype")
        dtype = DTYPES[found[0]]
    with megatron_device():
        model = _model(source, sizes=sizes, dtype=dtype, mode=mode)
        load_hf(model, source)
        if dist.get_rank() == 0:
            (target / STATE).mkdir(parents=True)
            (target / BESIDE).mkdir()
            copy_beside(source, target / BESIDE)
        dist.barrier()
        dist_checkpointing.save(_sharded(model), str(target / STATE), sharded_strategy=InProcessSave())
    return _counted(checkpoint)


def to_hf(
    source: Path,
    target: Path,
    *,
    model: str | None,
    sizes: MegatronConfig,
    dtype: torch.dtype,
    mode: MegatronToHf = MegatronToHf.raw,
) -> Converted:
    """Writes a Hugging Face folder from weights of Megatron-core; a collective of the world.

    Each rank writes some of the weights, of which it holds a part; the others' parts are sent to it.

    Args:
        source: from `to_megatron`, the checkpoint of a trainer, or any other that `torch_dist_folder` takes.
        target: must not exist yet; seen by all ranks.
        model: Hugging Face folder or hub id that configuration and tokenizer are taken from; None: those in `source`.
        sizes: parallel sizes that divide the world, whatever they were before.
        dtype: of the weights that are written.
        mode: as in `to_megatron`.

    Raises:
        ConfigError: a model that Megatron-core does not have.
        DataError: `source` is of another model, or says nothing of it.
    """
    about = model or str(source / BESIDE)
    if model is None and not (source / BESIDE).is_dir():
        raise DataError(f"{source} must hold {BESIDE}/config.json, got no such file; name the model with --model")
    with megatron_device():
        built = _model(about, sizes=sizes, dtype=dtype, mode=mode)
        load_weights(source, model=built)
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
            copy_beside(about, target)
            _say_dtype(target / "config.json", dtype)
        written = write_weights(built, target)
    return Converted(
        num_tensors=sum(each.num_tensors for each in written), num_bytes=sum(each.num_bytes for each in written)
    )


def stored_dtype(source: Path) -> torch.dtype:
    """The type of the weights in a folder of Megatron-core, by that of the embedding."""
    folder = torch_dist_folder(source)
    assert folder is not None, f"{source} was looked into before"
    with plain_files(folder):
        found = dist_checkpointing.load_tensors_metadata(str(folder))
    dtype: torch.dtype = found["embedding.word_embeddings.weight"].dtype
    return dtype


def _model(path: str, *, sizes: MegatronConfig, dtype: torch.dtype, mode: MegatronToHf) -> MegatronModel:
    make_grid(sizes, seed=0)
    config = ModelConfig(use_hf_config_for_megatron=True, megatron_to_hf_mode=mode)
    return build_model(path, model=config, megatron=sizes, dtype=dtype)


def _say_dtype(file: Path, dtype: torch.dtype) -> None:
    """Has a config.json name the type of the weights; one that does stays as it is."""
    content, name = json.loads(file.read_text(encoding="utf-8")), str(dtype).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    if content.get(key) != name:
        file.write_text(json.dumps({**content, key: name}, indent=2) + "\n", encoding="utf-8")


def _sharded(model: MegatronModel) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {
        f"model{i}": chunk.sharded_state_dict(metadata={"dp_cp_group": group}) for i, chunk in enumerate(model.chunks)
    }


def _counted(checkpoint: HfCheckpoint) -> Converted:
    sizes = [Path(file).stat().st_size for file in set(checkpoint.files.values())]
    return Converted(num_tensors=len(checkpoint.files), num_bytes=sum(sizes))
