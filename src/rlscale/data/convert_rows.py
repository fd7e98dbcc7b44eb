"""Converts a JSON or CSV file to JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlscale.data.rows import check_unique_names, json_type
from rlscale.errors import DataError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_FIELD_BYTES = 1 << 28


def convert_rows(source: Path, target: Path) -> int:
    """Writes the rows of a `.csv`, `.tsv` or JSON file as one JSON object per line; returns their number.

    A JSON file has a list of objects, an object with one list of objects (e.g. under `data`), or objects one after
    the other, over any number of lines. Values of CSV are strings.

    Raises:
        DataError: the source is none of these, or the target exists.
    """
    if target.exists():
        raise DataError(f"{target} must be a new file, got one that exists; choose another name")
    if not source.is_file():
        raise DataError(f"{source} must be a file, got nothing at {source.absolute()}; check the path")
    if not target.absolute().parent.is_dir():
        raise DataError(f"{target} must be in a folder that exists, got none; create it first")
    part = target.with_name(f"{target.name}.part")
    number = 0
    try:
        with part.open("w", encoding="utf-8") as lines:
            for row in _read(source):
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
                number += 1
        part.replace(target)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{source} must be JSON, CSV or TSV in UTF-8; {' '.join(str(error)[:200].split())}") from error
    finally:
        part.unlink(missing_ok=True)
    return number


def _read(source: Path) -> Iterator[dict[str, Any]]:
    delimiter = _DELIMITERS.get(source.suffix)
    if delimiter is None:
        yield from _read_json(source)
        return
    csv.field_size_limit(MAX_FIELD_BYTES)
    with source.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        check_unique_names(rows.fieldnames or (), source)
        for row in rows:
            if None in row or None in row.values():
                found = f"row {rows.line_num} has another number of fields"
                raise DataError(f"{source} must have as many fields in each row as in the first one; {found}")
            yield row


def _read_json(source: Path) -> Iterator[dict[str, Any]]:
    text = source.read_text(encoding="utf-8-sig").strip()
    decoder, position, values = json.JSONDecoder(), 0, []
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        values.append(value)
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
    if len(values) == 1:
        values = _find_list(values[0])
    for number, row in enumerate(values, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{source} must have objects as rows, got {json_type(row)} as row {number}")
        yield row


def _find_list(value: Any) -> list[Any]:
    """The rows of a file of one value: a list, the only list of objects in an object, or the object itself."""
    if isinstance(value, list):
        return value
    lists = [each for each in value.values() if _has_objects(each)] if isinstance(value, dict) else []
    return lists[0] if len(lists) == 1 and len(value) <= 3 else [value]


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
