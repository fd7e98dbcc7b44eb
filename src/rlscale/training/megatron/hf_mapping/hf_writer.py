"""Writes a Hugging Face folder tensor by tensor: a rank holds one file in memory, never the whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from rlscale.errors import DataError

MAX_FILE_BYTES = 5 * 10**9
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
)
"""Files of a model in addition to its weights; some models lack some of them."""


@dataclass(kw_only=True, slots=True)
class HfWriter:
    """Writes weights into an existing folder, in files of limited size. `close` gives the files their final names.

    Several ranks may write different tensors into one folder: one of them then calls `name_files` for all.

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
    _buffer: dict[str, Tensor] = field(default_factory=dict)  # tensors of the next file
    _buffer_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor into the buffer; writes a file first if the buffer is full."""
        size = tensor.numel() * tensor.element_size()
        if self._buffer and self._buffer_bytes + size > self.max_file_bytes:
            self._flush()
        # A copy: the caller may reuse the memory of the tensor for the next one.
        self._buffer[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._buffer_bytes += size
        self.num_bytes += size

    def finish(self) -> WrittenFiles:
        """Writes the last file under a temporary name; `name_files` gives the final names."""
        self._flush()
        files = tuple((_part(self.rank, i), tuple(names)) for i, names in enumerate(self._files))
        return WrittenFiles(files=files, num_bytes=self.num_bytes)

    def close(self) -> None:
        """Writes the last file, and the index if there are several files."""
        name_files(self.folder, [self.finish()])

    def _flush(self) -> None:
        if self._buffer:
            save_file(self._buffer, self.folder / _part(self.rank, len(self._files)), metadata={"format": "pt"})
            self._files.append(list(self._buffer))
            self._buffer, self._buffer_bytes = {}, 0


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
    """Copies configuration and tokenizer of a folder or hub id into an existing folder.

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
