"""Writes a Hugging Face folder tensor by tensor: a rank holds one tensor in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor
from transformers.utils.hub import cached_file

from rlscale.algo.checksum import bytes_of
from rlscale.errors import DataError
from rlscale.models.safetensors_files import DTYPE_CODES

MAX_FILE_BYTES = 5 * 10**9
_LENGTH_BYTES = 8
_HEADER_BYTES = 2**16
"""Room for length and header at the start of a file: about 500 tensors."""

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of the image processor of a model that reads images."""

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    *PROCESSOR_FILES,
)
"""Files of a model in addition to its weights; some models lack some of them."""


@dataclass(kw_only=True, slots=True)
class HfWriter:
    """Writes weights into an existing folder, in files of limited size. `close` gives the files their final names.

    Each tensor goes to its file at once; the header, which comes first in the file, is written last. Several ranks may
    write different tensors into one folder: one of them then calls `name_files` for all.

    Example:
        writer = HfWriter(folder=folder)
        for name, tensor in weights:
            writer.add(name, tensor)
        writer.close()
    """

    folder: Path
    max_file_bytes: int = MAX_FILE_BYTES
    rank: int = 0  # among the ranks that write into the folder
    num_bytes: int = 0  # written so far
    _files: list[list[str]] = field(default_factory=list)  # tensor names by file
    _open: BinaryIO | None = None  # the file that is being written
    _header: dict[str, Any] = field(default_factory=dict)  # its tensors
    _header_bytes: int = 0  # limit of the size of the header as text
    _data_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, into a new file if the current one is full. A name that was written is skipped."""
        # Tied embeddings come from the first and from the last pipeline stage. The offsets of a file must have no gap.
        if name in self._header or any(name in names for names in self._files):
            return
        entry = {
            "dtype": DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [self._data_bytes, self._data_bytes + tensor.nbytes],
        }
        entry_bytes = len(json.dumps({name: entry}))
        if self._open is not None:
            is_full = self._data_bytes + tensor.nbytes > self.max_file_bytes
            is_aligned = self._data_bytes % tensor.element_size() == 0
            if is_full or not is_aligned or self._header_bytes + entry_bytes > _HEADER_BYTES - _LENGTH_BYTES:
                self._flush()
                entry["data_offsets"] = [0, tensor.nbytes]
        if self._open is None:
            self._start_file()
        assert self._open is not None, "it was opened above"
        self._open.write(bytes_of(tensor.cpu()).data)
        self._header[name] = entry
        self._header_bytes += entry_bytes
        self._data_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> WrittenFiles:
        """Completes the last file under a temporary name; `name_files` gives the final names."""
        self._flush()
        files = tuple((_part(self.rank, i), tuple(names)) for i, names in enumerate(self._files))
        return WrittenFiles(files=files, num_bytes=self.num_bytes)

    def close(self) -> None:
        """Completes the last file, and writes the index if there are several files."""
        name_files(self.folder, [self.finish()])

    def _start_file(self) -> None:
        self._open = (self.folder / _part(self.rank, len(self._files))).open("wb")
        self._open.seek(_HEADER_BYTES)
        self._header, self._data_bytes = {"__metadata__": {"format": "pt"}}, 0
        self._header_bytes = len(json.dumps(self._header))

    def _flush(self) -> None:
        if self._open is None:
            return
        # The format allows spaces after the header.
        text = json.dumps(self._header).encode().ljust(_HEADER_BYTES - _LENGTH_BYTES)
        self._open.seek(0)
        self._open.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        self._open.close()
        self._files.append([name for name in self._header if name != "__metadata__"])
        self._open = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFiles:
    """Files that one rank has written, under temporary names."""

    files: tuple[tuple[str, tuple[str, ...]], ...]  # file name, names of its tensors
    num_bytes: int

    @property
    def num_tensors(self) -> int:
        return sum(len(names) for _, names in self.files)


def name_files(folder: Path, written: Sequence[WrittenFiles]) -> None:
    """Renames the files of all ranks to the names that transformers expects, and writes their index."""
    files = [each for rank in written for each in rank.files]
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / "model.safetensors")
        return
    by_tensor: dict[str, str] = {}
    for i, (part, names) in enumerate(files):
        file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        (folder / part).rename(folder / file)
        by_tensor |= dict.fromkeys(names, file)
    total = sum(rank.num_bytes for rank in written)
    index = {"metadata": {"total_size": total}, "weight_map": by_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _part(rank: int, number: int) -> str:
    return f".part-{rank}-{number}"


def copy_model_files(source: str, target: Path) -> None:
    """Copies configuration, tokenizer and image processor of a folder or hub id into an existing folder.

    Raises:
        DataError: config.json is missing.
    """
    for name in MODEL_FILES:
        folder = Path(source)
        found = folder / name if folder.is_dir() else _from_hub(source, name)
        if found is not None and found.is_file():
            shutil.copyfile(found, target / name)
    if not (target / "config.json").is_file():
        raise DataError(f"{source} must contain config.json, got no such file; name a Hugging Face folder or hub id")


def _from_hub(source: str, name: str) -> Path | None:
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
