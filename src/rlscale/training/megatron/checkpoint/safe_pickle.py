"""Restricted unpickling for Megatron-core's checkpoint format: reading a checkpoint runs no code from it.

A `torch_dist` folder has three kinds of pickled files: `.metadata` (positions of the tensors), `common.pt`, and a few
objects stored between the tensors. torch can restrict the latter two to an allow-list of plain types. `.metadata` is
checked here: every name it refers to must be allowed before Megatron-core loads it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch

from rlscale.errors import DataError

METADATA = ".metadata"
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load reads it at every call

_TORCH_CHECKPOINT = "torch.distributed.checkpoint."
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
        (f"{_TORCH_CHECKPOINT}filesystem", "_StorageInfo"),
        *(
            (f"{_TORCH_CHECKPOINT}metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
"""Names that `.metadata` may refer to, in addition to dtypes: constructing them has no side effects."""


@contextmanager
def restricted_pickle(folder: Path) -> Iterator[None]:
    """Makes it safe to read a `torch_dist` folder with Megatron-core inside the context.

    Raises:
        DataError: `.metadata` refers to a name that is not allowed. A missing file raises OSError as usual.
    """
    _check_names(folder / METADATA)
    # Overrides weights_only=False in Megatron-core's calls of torch.load.
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _check_names(file: Path) -> None:
    with file.open("rb") as stream:
        try:
            _RestrictedUnpickler(stream).load()
        except pickle.UnpicklingError as error:
            rule, fix = "contain only values that Megatron-core writes", "load only checkpoints that you trust"
            raise DataError(f"{file} must {rule}, got {error}; {fix}") from error


def _enum_member(owner: Any, name: str) -> Any:
    """Replaces `getattr`, which Python up to 3.11.3 calls to unpickle a member of an enumeration."""
    if isinstance(owner, EnumType) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"the attribute {name} of {owner!r}")


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the name {module}.{name}")
