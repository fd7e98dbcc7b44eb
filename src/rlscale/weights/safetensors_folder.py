"""Weights as a folder of safetensors files that appears all at once, with the checksum of every tensor.

<folder>/model-00001.safetensors, ...   one bucket each
<folder>/model.safetensors.index.json   tensor -> file
<folder>/checksums.json                 tensor -> checksum
<folder>/config.json, tokenizer.json, ...   of the model the weights belong to
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, Bytes, block_digest, bytes_of, digest_of
from rlscale.errors import WeightSyncError
from rlscale.types import WeightBucket
from rlscale.weights.buckets import Named, cut, layout_of, sizes_of
from rlscale.weights.readers import copy_checked, landing

CHECKSUMS = "checksums.json"
INDEX = "model.safetensors.index.json"
WRITING = ".writing"
_DTYPES = {
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
_NAMES = {code: name for name, code in _DTYPES.items()}
_HEADER_MULTIPLE = 64  # tensors then begin where a memory map can be read as any dtype
_OF_THE_MODEL = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(kw_only=True, slots=True)
class Written:
    """What is in files so far."""

    checksums: dict[str, str] = field(default_factory=dict)  # by tensor
    files: dict[str, str] = field(default_factory=dict)  # tensor -> name of its file
    num_bytes: int = 0

    @property
    def num_files(self) -> int:
        return len(set(self.files.values()))

    def add(self, *, checksums: Mapping[str, str], files: Mapping[str, str], num_bytes: int) -> None:
        """Takes in what else has been written."""
        self.checksums.update(checksums)
        self.files.update(files)
        self.num_bytes += num_bytes


def write_folder(folder: Path, weights: Iterable[Named], *, bucket_bytes: int, model_folder: Path | None) -> Written:
    """Writes `folder`, which must not exist; whoever sees it sees all of it.

    Args:
        bucket_bytes: most bytes of a file (a larger tensor has one of its own).
        model_folder: where configuration and tokenizer are copied from.
    """
    start_folder(folder)
    written = write_files(folder, weights, bucket_bytes=bucket_bytes)
    finish_folder(folder, written, model_folder=model_folder)
    return written


def start_folder(folder: Path) -> None:
    """Makes the place where a folder is written, which nobody takes for it."""
    writing = _writing(folder)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def write_files(folder: Path, weights: Iterable[Named], *, bucket_bytes: int, stem: str = "model") -> Written:
    """Writes weights into a folder that was started. Several processes may, each with a `stem` of its own."""
    writing, written = _writing(folder), Written()
    for i, named in enumerate(cut(weights, bucket_bytes)):
        path = writing / f"{stem}-{i + 1:05d}.safetensors"
        written.add(
            checksums=write_file(path, named),
            files=dict.fromkeys((name for name, _ in named), path.name),
            num_bytes=sum(tensor.nbytes for _, tensor in named),
        )
    return written


def finish_folder(folder: Path, written: Written, *, model_folder: Path | None) -> None:
    """Has a folder appear in which everything was written."""
    writing = _writing(folder)
    _copy_model_files(model_folder, writing)
    write_json(writing / INDEX, {"metadata": {"total_size": written.num_bytes}, "weight_map": written.files})
    write_json(writing / CHECKSUMS, written.checksums)
    writing.rename(folder)


def _writing(folder: Path) -> Path:
    return folder.with_name(folder.name + WRITING)


def write_file(path: Path, named: Sequence[Named]) -> dict[str, str]:
    """One safetensors file, and the checksum of each tensor.

    The format is written here because the library first copies every tensor into a bytes object, which takes as much
    memory again and more time than the writing.
    """
    layout, header, start = layout_of(named), {}, 0
    for name, dtype, shape, size in zip(layout.names, layout.dtypes, layout.shapes, sizes_of(layout), strict=True):
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_MULTIPLE)
    checksums = {}
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for name, tensor in named:
            checksums[name] = _write_hashed(file.fileno(), bytes_of(tensor.cpu()))
    return checksums


def read_checksums(folder: Path) -> dict[str, str]:
    """What `checksums.json` says; empty where there is none, as in a folder that somebody else wrote."""
    path = folder / CHECKSUMS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_json(path: Path, value: object) -> None:
    """Replaces a JSON file at once."""
    temporary = path.with_name(path.name + WRITING)
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


class FolderWeights:
    """The weights of one folder, seen from an engine.

    Raises ValueError when the folder holds no safetensors files that can be read.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, str]) -> None:
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not files:
            raise ValueError(f"model_path must be a folder with safetensors files, got {str(folder)!r}")
        self._places: list[tuple[Path, str]] = []
        names: list[str] = []
        dtypes: list[str] = []
        shapes: list[list[int]] = []
        for file in files:
            for name, dtype, shape in _describe(file):
                names.append(name)
                dtypes.append(dtype)
                shapes.append(shape)
                self._places.append((file, name))
        announced = dict(checksums) or read_checksums(folder)
        wrong = sorted(announced.keys() ^ set(names)) if announced else []
        if wrong:
            raise WeightSyncError(
                f"{wrong[0]} must be in {folder} and have a checksum; the folder is not what was sent"
            )
        sums = [announced[name] for name in names] if announced else []
        self.layout = WeightBucket(names=names, dtypes=dtypes, shapes=shapes, checksums=sums)

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights."""
        checksums: dict[str, str] = {}
        for i, (file, name) in enumerate(self._places):
            sent = self.layout.checksums[i] if self.layout.checksums else ""
            with safe_open(file, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            target = None if targets is None else targets[i]
            into, finish = landing(target, self.layout.dtypes[i], self.layout.shapes[i])
            checksums[name] = copy_checked(name, bytes_of(tensor), into, sent)
            finish()
        return checksums


def map_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of the file: writing to them changes it."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", offset=0))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        dtype = getattr(torch, _NAMES[entry["dtype"]])
        tensors[name] = data[start:end].view(dtype).view(entry["shape"])
    return tensors


def _describe(file: Path) -> list[tuple[str, str, list[int]]]:
    try:
        with safe_open(file, framework="pt") as opened:
            found = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - not a mapping
            return [(name, _NAMES[piece.get_dtype()], list(piece.get_shape())) for name, piece in found]
    except (SafetensorError, OSError, KeyError) as e:
        raise ValueError(f"{file} must be a safetensors file, got one that cannot be read: {e}") from e


def _write_hashed(fd: int, data: Bytes) -> str:
    digests = []
    for start in range(0, data.size, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        _write_all(fd, block.data)
        digests.append(block_digest(block))
    return digest_of(digests, data.size)


def _write_all(fd: int, data: memoryview) -> None:
    view = data
    while view:
        view = view[os.write(fd, view) :]


def _copy_model_files(source: Path | None, target: Path) -> None:
    if source is None or not source.is_dir():
        return
    for pattern in _OF_THE_MODEL:
        for file in source.glob(pattern):
            if file.name not in (INDEX, CHECKSUMS):
                shutil.copyfile(file, target / file.name)
