"""Weight files of a model whose weights a test does not read."""

from pathlib import Path

HEADER = b"{}"


def write_no_weights(file: Path) -> None:
    """A complete safetensors file without tensors."""
    file.write_bytes(len(HEADER).to_bytes(8, "little") + HEADER)
