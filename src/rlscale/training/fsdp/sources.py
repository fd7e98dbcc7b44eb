"""Weights of a model from the checkpoint of a trainer."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rlscale.errors import DataError


def load_weights(folder: Path, *, model: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Takes the weights of the model that was saved in a checkpoint; a collective. The optimiser's state is not read.

    Args:
        folder: of one checkpoint.
        model: sharded, of the same architecture.
        but: beginnings of names that stay as they are.

    Raises:
        DataError: the checkpoint is missing, or is of another model.
    """
    tensors = folder / "tensors"
    if not tensors.is_dir():
        raise DataError(f"{folder} must be a checkpoint of a trainer, got none there; check the path")
    reader = HuggingFaceStorageReader(str(tensors))
    found = reader.read_metadata().state_dict_metadata
    wanted = {f"model.{n}": p.detach() for n, p in model.named_parameters() if not n.startswith(but or ("\0",))}
    for name, weight in wanted.items():
        size = getattr(found.get(name), "size", None)
        if size != weight.shape:
            had = "no such weight" if size is None else f"the shape {tuple(size)}"
            rule = f"hold {name} of the shape {tuple(weight.shape)}"
            raise DataError(f"{folder} must {rule}, got {had}; name a checkpoint of the same architecture")
    load(wanted, storage_reader=reader)
