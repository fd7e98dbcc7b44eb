"""Conversion of weights between Hugging Face folders and Megatron-core folders, by one or more ranks.

<folder>/torch_dist/   weights by their position in the whole model, which any parallel sizes can read
<folder>/hf/           configuration and tokenizer

A checkpoint of a trainer has the same `torch_dist`, with the optimiser's state next to the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from transformers import AutoConfig

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import hf_fields
from rlscale.config import LoraConfig, MegatronConfig, ModelConfig
from rlscale.config.groups.model import MegatronToHf
from rlscale.errors import DataError
from rlscale.models.megatron_folder import STATE, torch_dist_folder
from rlscale.models.transformers_aliases import register_aliases
from rlscale.training.megatron.adapters import add_adapters
from rlscale.training.megatron.checkpoint.dist_checkpoint import InProcessSave, load_weights, saved_adapters
from rlscale.training.megatron.checkpoint.safe_pickle import restricted_pickle
from rlscale.training.megatron.export import write_weights
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint, load_hf
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.megatron_model import MTP, MegatronModel, build_model
from rlscale.training.megatron.parallel_dims import build_parallel_dims
from rlscale.training.transfer.hf_writer import copy_model_files

HF_FOLDER = "hf"
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """Size of the weights that a conversion wrote."""

    num_tensors: int
    num_bytes: int


def convert_to_megatron(
    source: str,
    target: Path,
    *,
    sizes: MegatronConfig,
    dtype: torch.dtype | None = None,
    mode: MegatronToHf = MegatronToHf.raw,
) -> ConversionReport:
    """Writes the weights of a Hugging Face folder or hub id into a new folder; a collective of the world.

    Each rank reads and writes the shards that it would hold in training with these sizes.

    Args:
        source: with safetensors.
        target: must not exist yet.
        sizes: parallel sizes that divide the world.
        dtype: of the weights; None: as stored.
        mode: selects the mapping of names and layouts.

    Raises:
        ConfigError: Megatron-core does not support the model.
        DataError: weights are missing, or have several dtypes.
    """
    checkpoint = HfCheckpoint(source)
    if dtype is None:
        found = sorted(checkpoint.dtypes())
        if len(found) != 1 or found[0] not in SAFETENSORS_DTYPES:
            rule = f"contain tensors of one dtype among {', '.join(SAFETENSORS_DTYPES)}"
            raise DataError(f"{source} must {rule}, got {', '.join(found)}; choose one with --dtype")
        dtype = SAFETENSORS_DTYPES[found[0]]
    config_json = _read_config(source)
    mtp, num_layers = find_family(config_json["model_type"]).mtp, int(hf_fields(config_json)["num_layers"])
    has_mtp = mtp is not None and any(mtp.has(name, num_layers=num_layers) for name in checkpoint.files)
    with megatron_device():
        model = _build_empty_model(source, sizes=_fit_sizes(sizes, config_json, has_mtp), dtype=dtype, mode=mode)
        load_hf(model, source)
        if dist.get_rank() == 0:
            (target / STATE).mkdir(parents=True)
            (target / HF_FOLDER).mkdir()
            copy_model_files(source, target / HF_FOLDER)
        dist.barrier()
        dist_checkpointing.save(_sharded_weights(model), str(target / STATE), sharded_strategy=InProcessSave())
    return _report_files(checkpoint)


def convert_to_hf(
    source: Path,
    target: Path,
    *,
    model: str | None,
    sizes: MegatronConfig,
    dtype: torch.dtype,
    mode: MegatronToHf = MegatronToHf.raw,
) -> ConversionReport:
    """Writes a Hugging Face folder from weights of Megatron-core; a collective of the world.

    Each rank writes some of the weights of which it holds a shard, and receives their other shards. Adapters of a
    checkpoint are added to their weights.

    Args:
        source: from `convert_to_megatron`, the checkpoint of a trainer, or any other that `torch_dist_folder` accepts.
        target: must not exist yet; visible to all ranks.
        model: Hugging Face folder or hub id that provides configuration and tokenizer; None: those in `source`.
        sizes: parallel sizes that divide the world; they need not be those of the source.
        dtype: of the written weights.
        mode: as in `convert_to_megatron`.

    Raises:
        ConfigError: Megatron-core does not support the model.
        DataError: `source` belongs to another model, or has no configuration.
    """
    hf_source = model or str(source / HF_FOLDER)
    if model is None and not (source / HF_FOLDER).is_dir():
        rule = f"contain {HF_FOLDER}/config.json"
        raise DataError(f"{source} must {rule}, got no such file; name the model with --model")
    has_mtp = any(name.startswith(MTP) for name in _stored_tensors(source))
    with megatron_device():
        sizes = _fit_sizes(sizes, _read_config(hf_source), has_mtp)
        built = _build_empty_model(hf_source, sizes=sizes, dtype=dtype, mode=mode)
        adapters = saved_adapters(source)
        if adapters is not None:
            lora = LoraConfig(
                rank=adapters["r"], alpha=adapters["lora_alpha"], target_modules=adapters["target_modules"]
            )
            built = add_adapters(built, hf_source, lora, seed=0)
        load_weights(source, model=built)
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
            copy_model_files(hf_source, target)
            _set_config_dtype(target / "config.json", dtype)
        written = write_weights(built, target)
    return ConversionReport(
        num_tensors=sum(each.num_tensors for each in written), num_bytes=sum(each.num_bytes for each in written)
    )


def stored_dtype(source: Path) -> torch.dtype:
    """The dtype of the weights in a Megatron-core folder, taken from the embedding."""
    dtype: torch.dtype = _stored_tensors(source)["embedding.word_embeddings.weight"].dtype
    return dtype


def _stored_tensors(source: Path) -> dict[str, Any]:
    """Names, shapes and dtypes in a Megatron-core folder."""
    folder = torch_dist_folder(source)
    assert folder is not None, f"the caller checks that {source} has weights"
    with restricted_pickle(folder):
        found: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(folder))
    return found


def _read_config(path: str) -> dict[str, Any]:
    register_aliases()
    found: dict[str, Any] = AutoConfig.from_pretrained(path).to_dict()
    return found


def _fit_sizes(sizes: MegatronConfig, config_json: dict[str, Any], has_mtp: bool) -> MegatronConfig:
    """The same sizes, with the layers for multi-token prediction of a source that has them."""
    number = int(hf_fields(config_json).get("num_nextn_predict_layers") or 0)
    core_args = dict(sizes.core_args)
    if has_mtp and number:
        core_args["mtp_num_layers"] = number
    if find_family(config_json["model_type"]).sinks:
        core_args.setdefault("expert_tensor_parallel_size", 1)  # ranks cannot divide experts with biases
    return replace(sizes, core_args=core_args)


def _build_empty_model(path: str, *, sizes: MegatronConfig, dtype: torch.dtype, mode: MegatronToHf) -> MegatronModel:
    build_parallel_dims(sizes, seed=0)
    config = ModelConfig(use_hf_config_for_megatron=True, megatron_to_hf_mode=mode)
    return build_model(path, model=config, megatron=sizes, dtype=dtype)


def _set_config_dtype(file: Path, dtype: torch.dtype) -> None:
    """Writes the dtype of the weights into a config.json, unless it is there already."""
    content, name = json.loads(file.read_text(encoding="utf-8")), str(dtype).removeprefix("torch.")
    # Older versions of transformers call the key torch_dtype.
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    if content.get(key) != name:
        file.write_text(json.dumps({**content, key: name}, indent=2) + "\n", encoding="utf-8")


def _sharded_weights(model: MegatronModel) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {
        f"model{i}": chunk.sharded_state_dict(metadata={"dp_cp_group": group}) for i, chunk in enumerate(model.chunks)
    }


def _report_files(checkpoint: HfCheckpoint) -> ConversionReport:
    sizes = [Path(file).stat().st_size for file in set(checkpoint.files.values())]
    return ConversionReport(num_tensors=len(checkpoint.files), num_bytes=sum(sizes))
