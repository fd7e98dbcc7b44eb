"""Reading Megatron-core's checkpoint format without running what its pickled files may say.

Three kinds of files in a `torch_dist` folder are pickled: `.metadata`, which says where tensors lie, `common.pt`, and
the few objects among the tensors. torch reads the latter two by a list of plain types where it is told to; of the
first, every name that it mentions is looked up here before anybody loads it.
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
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load asks for it at every call

_OF_TORCH = "torch.distributed.checkpoint."
_PLAIN = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
        (f"{_OF_TORCH}filesystem", "_StorageInfo"),
        *(
            (f"{_OF_TORCH}metadata", name)
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
"""What a `.metadata` may be made of, beside types of tensors: values that do nothing when they are made."""


@contextmanager
def plain_files(folder: Path) -> Iterator[None]:
    """While Megatron-core reads a `torch_dist` folder: nothing in it can name code to be run.

    Raises:
        DataError: `.metadata` mentions something else than plain values. An OSError, where it is missing, stays one.
    """
    _check(folder / METADATA)
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _check(file: Path) -> None:
    with file.open("rb") as stream:
        try:
            _Plain(stream).load()
        except pickle.UnpicklingError as error:
            rule, fix = "hold what Megatron-core writes there", "load only checkpoints that you trust"
            raise DataError(f"{file} must {rule}, got {error}; {fix}") from error


def _member(owner: Any, name: str) -> Any:
    """What pickled members of enumerations are read with: Python up to 3.11.3 calls `getattr` for them."""
    if isinstance(owner, EnumType) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"the attribute {name} of {owner!r}")


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the name {module}.{name}")
