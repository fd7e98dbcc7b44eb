"""Hugging Face folder of a trainer's checkpoint, written by one process without the run."""

from __future__ import annotations

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from rlscale.config import ComputeDtype, FsdpConfig, MegatronConfig, RunConfig, TrainConfig
from rlscale.config.groups.model import MegatronToHf
from rlscale.models.megatron_folder import torch_dist_folder


def export_checkpoint(checkpoint: Path, target: Path, *, model: str, config: RunConfig) -> None:
    """Writes the policy of a checkpoint as a folder that engines and transformers load. It is complete or absent.

    The weights pass through the memory of one process, in float32 with the FSDP backend.

    Args:
        checkpoint: folder of one checkpoint of a trainer.
        target: must not exist yet.
        model: Hugging Face folder or hub id with the configuration and the tokenizer.
        config: of the run that wrote the checkpoint.

    Raises:
        ConfigError, DataError: the checkpoint belongs to another model, or cannot be read.
    """
    temporary = target.with_name(f"{target.name}.saving")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    # In a process that ends: a process group changes the environment, and its memory must be free for the engines.
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        if torch_dist_folder(checkpoint) is not None:
            mode = config.model.megatron_to_hf_mode
            pool.submit(_export_megatron, checkpoint, temporary, model, config.train.dtype, mode).result()
        else:
            train = config.train
            pool.submit(_export_fsdp, checkpoint, temporary, model, config.fsdp.writable_copy(), train).result()
    temporary.rename(target)


def _export_fsdp(checkpoint: Path, target: Path, model: str, fsdp: FsdpConfig, train: TrainConfig) -> None:
    """Exports in its own process; imports torch here, since the command that calls this needs none."""
    import torch

    from rlscale.training.distributed import join_world, leave_world, make_data_mesh
    from rlscale.training.fsdp.checkpoint import load_weights
    from rlscale.training.fsdp.export import export_hf
    from rlscale.training.fsdp.model import DTYPES, load_sharded

    join_world(0, 1, "127.0.0.1", 0, "gloo", 1800.0)
    mesh = make_data_mesh(torch.device("cpu"))
    # One rank in float32 shards nothing; adapters are part of the checkpoint and are merged.
    plain = replace(train, dtype=ComputeDtype.float32, true_on_policy_mode=False)
    loaded = load_sharded(model, mesh=mesh, fsdp=replace(fsdp, context_parallel_size=1), train=plain, is_trained=True)
    load_weights(checkpoint, model=loaded)
    export_hf(loaded, target, source=model, dtype=DTYPES[train.dtype])
    leave_world()


def _export_megatron(checkpoint: Path, target: Path, model: str, dtype: ComputeDtype, mode: MegatronToHf) -> None:
    """As `_export_fsdp`, with Megatron-core; imports as there."""
    import torch

    from rlscale.training.distributed import join_world, leave_world
    from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf
    from rlscale.training.megatron.parallel_dims import destroy_parallel_dims

    join_world(0, 1, "127.0.0.1", 0, "gloo", 1800.0)
    sizes = MegatronConfig(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    convert_to_hf(checkpoint, target, model=model, sizes=sizes, dtype=getattr(torch, str(dtype)), mode=mode)
    destroy_parallel_dims()
    leave_world()
