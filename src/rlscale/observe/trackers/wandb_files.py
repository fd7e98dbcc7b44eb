"""Reads the files of offline runs of Weights & Biases.

A `run-<id>.wandb` file is a log of protobuf records. A header of 7 bytes is followed by blocks of 32 KiB. A record is
one or more chunks in them, each with checksum (uint32), length (uint16) and kind (uint8).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # created at import

_FILE_HEADER, _BLOCK = 7, 32768
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def read_records(file: Path) -> Iterator[Record]:
    """Records of a file, up to the first incomplete one."""
    data, position, parts = file.read_bytes(), _FILE_HEADER, bytearray()
    while True:
        # A block that cannot hold another chunk header ends with padding.
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _CHUNK_HEADER.size:
            position += left_in_block
        if position + _CHUNK_HEADER.size > len(data):
            return
        checksum, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        position += _CHUNK_HEADER.size
        chunk = data[position : position + length]
        # The checksum covers the kind byte and the data.
        if len(chunk) < length or zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum:
            return
        position += length
        if kind in (_WHOLE, _FIRST):
            parts.clear()
        parts += chunk
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(bytes(parts))


def read_history(file: Path) -> Iterator[dict[str, str]]:
    """Rows of a file, as JSON texts by name."""
    for record in read_records(file):
        if record.HasField("history"):
            # The field with the name depends on the wandb version that wrote the file.
            yield {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}


def num_offline_rows(folder: Path, run_id: str) -> int:
    """`_step` after the last row of earlier offline starts of this run. 0 if there is none."""
    files = folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((int(row["_step"]) + 1 for file in files for row in read_history(file)), default=0)
