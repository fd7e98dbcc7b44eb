"""A Hugging Face folder, written tensor by tensor: one file is held in memory, never the whole model."""

from __future__ import annotations

import json
import shutil
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

    Example:
        writer = HfWriter(folder=folder)
        for name, tensor in weights:
            writer.add(name, tensor)
        writer.close()
    """

    folder: Path
    max_file_bytes: int = MAX_FILE_BYTES
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

    def close(self) -> None:
        """Writes the last file, and the index where there are several."""
        self._flush()
        number = len(self._files)
        if number == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        by_tensor: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05}-of-{number:05}.safetensors"
            self._part(i).rename(self.folder / file)
            by_tensor |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": by_tensor}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        if self._held:
            save_file(self._held, self._part(len(self._files)), metadata={"format": "pt"})
            self._files.append(list(self._held))
            self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f".part-{number}"


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
