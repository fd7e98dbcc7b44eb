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

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, Bytes, block_digest, bytes_of, digest_of
from rlscale.architectures.low_precision import quantization_config
from rlscale.errors import WeightSyncError
from rlscale.models.safetensors_files import DTYPE_CODES, DTYPE_NAMES, map_tensors
from rlscale.weight_types import WeightBucket
from rlscale.weights.buckets import Named, describe_bucket, split_into_buckets, tensor_sizes
from rlscale.weights.readers import copy_verified, open_target

CHECKSUMS = "checksums.json"
INDEX = "model.safetensors.index.json"
WRITING = ".writing"
_HEADER_MULTIPLE = 64  # so that tensors in a memory map are aligned for any dtype
_MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(kw_only=True, slots=True)
class TensorFiles:
    """Tensors that have been written to files."""

    checksums: dict[str, str] = field(default_factory=dict)  # by tensor
    files: dict[str, str] = field(default_factory=dict)  # tensor -> name of its file
    num_bytes: int = 0

    @property
    def num_files(self) -> int:
        return len(set(self.files.values()))

    def add(self, *, checksums: Mapping[str, str], files: Mapping[str, str], num_bytes: int) -> None:
        """Adds the files that another call or rank wrote."""
        self.checksums.update(checksums)
        self.files.update(files)
        self.num_bytes += num_bytes


def start_folder(folder: Path) -> None:
    """Creates an empty folder under a temporary name, for the files of `folder`."""
    writing = _writing(folder)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def write_files(folder: Path, weights: Iterable[Named], *, bucket_bytes: int, stem: str = "model") -> TensorFiles:
    """Writes weights into a started folder. Several processes may do so, each with a different `stem`."""
    writing, written = _writing(folder), TensorFiles()
    for i, named in enumerate(split_into_buckets(weights, bucket_bytes)):
        path = writing / f"{stem}-{i + 1:05d}.safetensors"
        written.add(
            checksums=write_file(path, named),
            files=dict.fromkeys((name for name, _ in named), path.name),
            num_bytes=sum(tensor.nbytes for _, tensor in named),
        )
        # Free the bucket before the next one is filled.
        named.clear()
    return written


def finish_folder(
    folder: Path, written: TensorFiles, *, model_folder: Path | None, precision: str | None = None
) -> None:
    """Completes a started folder and gives it its final name.

    Args:
        model_folder: with the configuration and tokenizer to copy.
        precision: of the weights, which the configuration of the folder then declares.
    """
    writing = _writing(folder)
    _copy_model_files(model_folder, writing)
    config = writing / "config.json"
    if precision is not None and config.is_file():
        content = json.loads(config.read_text(encoding="utf-8"))
        write_json(config, {**content, "quantization_config": quantization_config(precision)})
    write_json(writing / INDEX, {"metadata": {"total_size": written.num_bytes}, "weight_map": written.files})
    write_json(writing / CHECKSUMS, written.checksums)
    # Last: an engine that sees the folder sees all of it.
    writing.rename(folder)


def recreate_folder(folder: Path) -> None:
    """Creates an empty folder in place of an existing one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _writing(folder: Path) -> Path:
    return folder.with_name(folder.name + WRITING)


def write_file(path: Path, named: Sequence[Named]) -> dict[str, str]:
    """Writes one safetensors file and returns the checksum of each tensor.

    The format is written here because the library first copies every tensor into a bytes object, which doubles the
    memory and takes longer than the write.
    """
    layout, header, start = describe_bucket(named), {}, 0
    # The offsets count from the end of the header.
    for name, dtype, shape, size in zip(layout.names, layout.dtypes, layout.shapes, tensor_sizes(layout), strict=True):
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    # Padded so that header and its 8 bytes of length end at a multiple of 64.
    text += b" " * (-(len(text) + 8) % _HEADER_MULTIPLE)
    checksums = {}
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for name, tensor in named:
            checksums[name] = _write_hashed(file.fileno(), bytes_of(tensor.cpu()))
    return checksums


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the content of `checksums.json`; empty without one, as in a folder of another program."""
    path = folder / CHECKSUMS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_json(path: Path, value: object) -> None:
    """Replaces a JSON file in one step."""
    temporary = path.with_name(path.name + WRITING)
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


class FolderWeights:
    """The weights of one folder, as an engine reads them.

    Raises ValueError when the folder contains no readable safetensors files.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, str]) -> None:
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not files:
            raise ValueError(f"model_path must be a folder with safetensors files, got {str(folder)!r}")
        self._sources: list[tuple[Path, str]] = []
        names: list[str] = []
        dtypes: list[str] = []
        shapes: list[list[int]] = []
        for file in files:
            for name, dtype, shape in _read_layout(file):
                names.append(name)
                dtypes.append(dtype)
                shapes.append(shape)
                self._sources.append((file, name))
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
        for i, (file, name) in enumerate(self._sources):
            sent = self.layout.checksums[i] if self.layout.checksums else ""
            with safe_open(file, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            target = None if targets is None else targets[i]
            buffer, finish = open_target(target, self.layout.dtypes[i], self.layout.shapes[i])
            checksums[name] = copy_verified(name, bytes_of(tensor), buffer, sent)
            finish()
        return checksums


def map_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file as views of the file: writing to them changes it."""
    return map_tensors(path, writable=True)


def _read_layout(file: Path) -> list[tuple[str, str, list[int]]]:
    try:
        with safe_open(file, framework="pt") as opened:
            found = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - not a mapping
            return [(name, DTYPE_NAMES[piece.get_dtype()], list(piece.get_shape())) for name, piece in found]
    except (SafetensorError, OSError, KeyError) as e:
        raise ValueError(f"{file} must be a safetensors file, got one that cannot be read: {e}") from e


def _write_hashed(fd: int, data: Bytes) -> str:
    digests = []
    for start in range(0, data.size, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        _write_all(fd, block.data)
        digests.append(block_digest(block))  # still in cache
    return digest_of(digests, data.size)


def _write_all(fd: int, data: memoryview) -> None:
    view = data
    # A write may be partial; Linux writes at most 2 GiB at once.
    while view:
        view = view[os.write(fd, view) :]


def _copy_model_files(source: Path | None, target: Path) -> None:
    if source is None or not source.is_dir():
        return
    for pattern in _MODEL_FILES:
        for file in source.glob(pattern):
            if file.name not in (INDEX, CHECKSUMS):
                shutil.copyfile(file, target / file.name)
