"""Tensors in safetensors files, mapped into memory: a reader pays only for the rows that it copies."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPE_CODES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
    }
)
"""Codes of the format by the name of the dtype in torch."""

DTYPE_NAMES = MappingProxyType({code: name for name, code in DTYPE_CODES.items()})


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """Returns the tensors of a file as views of it, by name.

    Args:
        path: of the file.
        writable: writing to a tensor changes the file. Otherwise no one may write to it.

    Raises:
        ValueError: the file is not in the format.
    """
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        with warnings.catch_warnings():
            # torch warns about every array that is read-only. A private mapping would be writable, but counts as memory
            # that the process asks for, so Linux refuses one that is larger than the machine.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+" if writable else "r"))
        # 8 bytes of length and the header come before the data.
        start = 8 + header_bytes
        return {name: _view(data, start, entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} must be a safetensors file, got one that cannot be read: {error}") from error


def _view(data: Tensor, data_start: int, entry: dict[str, Any]) -> Tensor:
    first, last = (data_start + offset for offset in entry["data_offsets"])
    flat, dtype = data[first:last], getattr(torch, DTYPE_NAMES[entry["dtype"]])
    # Headers of some programs are not padded: then a tensor may start between two elements, and needs a copy.
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    view: Tensor = flat.view(dtype).view(entry["shape"])
    return view


class MappedFiles:
    """The tensors of several safetensors files, by name. Files are mapped until the object is freed.

    Raises ValueError for a file that is not in the format.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            self._tensors |= map_tensors(file)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """A view of the file."""
        return self._tensors[name]
