"""A Hugging Face folder, written tensor by tensor: a rank holds one file in memory, never the whole model."""

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
BESIDE = (
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
"""What belongs to a model beside its weights, where there is such a file."""


@dataclass(kw_only=True, slots=True)
class HfWriter:
    """Writes weights into an existing folder, as many to a file as fit. `close` gives the files their names.

    Several ranks may write into one folder, each its own tensors: one of them then names all files with `name_files`.

    Example:
        writer = HfWriter(folder=folder)
        for name, tensor in weights:
            writer.add(name, tensor)
        writer.close()
    """

    folder: Path
    max_file_bytes: int = MAX_FILE_BYTES
    rank: int = 0  # of those that write into the folder
    num_bytes: int = 0  # of all tensors
    _files: list[list[str]] = field(default_factory=list)  # tensors by file
    _held: dict[str, Tensor] = field(default_factory=dict)
    _held_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Keeps a copy, and writes a file when it is full."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self.max_file_bytes:
            self._flush()
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self.num_bytes += size

    def finish(self) -> Written:
        """Writes the last file. The files are then named by `name_files`."""
        self._flush()
        files = tuple((_part(self.rank, i), tuple(names)) for i, names in enumerate(self._files))
        return Written(files=files, num_bytes=self.num_bytes)

    def close(self) -> None:
        """Writes the last file, and the index where there are several."""
        name_files(self.folder, [self.finish()])

    def _flush(self) -> None:
        if self._held:
            save_file(self._held, self.folder / _part(self.rank, len(self._files)), metadata={"format": "pt"})
            self._files.append(list(self._held))
            self._held, self._held_bytes = {}, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What one rank has written."""

    files: tuple[tuple[str, tuple[str, ...]], ...]  # name, and the tensors in it
    num_bytes: int

    @property
    def num_tensors(self) -> int:
        return sum(len(names) for _, names in self.files)


def name_files(folder: Path, written: Sequence[Written]) -> None:
    """Gives the files of all ranks the names under which transformers looks for them, and writes their index."""
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


def copy_beside(source: str, target: Path) -> None:
    """Copies configuration and tokenizer of a folder or hub id into an existing folder.

    Raises:
        DataError: there is no config.json.
    """
    for name in BESIDE:
        folder = Path(source)
        found = folder / name if folder.is_dir() else _from_hub(source, name)
        if found is not None and found.is_file():
            shutil.copyfile(found, target / name)
    if not (target / "config.json").is_file():
        raise DataError(f"{source} must hold config.json, got no such file; name a Hugging Face folder or hub id")


def _from_hub(source: str, name: str) -> Path | None:
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
