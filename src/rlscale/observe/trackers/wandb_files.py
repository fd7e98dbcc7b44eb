"""Reads what offline runs of Weights & Biases have written.

A `run-<id>.wandb` file is a log of protobuf records: after a header of 7 bytes come blocks of 32 KiB, in which a record
is one chunk or several, each with checksum (uint32), length (uint16) and kind (uint8).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at import

_FILE_HEADER, _BLOCK = 7, 32768
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def read_records(file: Path) -> Iterator[Record]:
    """The records of a file, up to the first one that was not written completely."""
    data, position, parts = file.read_bytes(), _FILE_HEADER, bytearray()
    while True:
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _CHUNK_HEADER.size:
            position += left_in_block
        if position + _CHUNK_HEADER.size > len(data):
            return
        checksum, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        position += _CHUNK_HEADER.size
        chunk = data[position : position + length]
        if len(chunk) < length or zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum:
            return
        position += length
        if kind in (_WHOLE, _FIRST):
            parts.clear()
        parts += chunk
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(bytes(parts))


def read_history(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a file, as JSON texts by name."""
    for record in read_records(file):
        if record.HasField("history"):
            # Which of the two fields holds the name depends on the version that wrote it.
            yield {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}


def num_offline_rows(folder: Path, run_id: str) -> int:
    """The `_step` after the last row that earlier offline starts of this run have written; 0 without any."""
    files = folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((int(row["_step"]) + 1 for file in files for row in read_history(file)), default=0)
