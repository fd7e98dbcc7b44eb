"""Rows of prompt files, and the parser of lines of JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlscale.errors import DataError, count_noun

MAX_ROW_BYTES = 1 << 28
"""Longest line that is parsed: 256 MiB."""

SPACE = b" \t\r\n\v\f"
"""A line of only these bytes is blank."""

_SHOWN = 60
_MISSING = object()
_BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}

_OTHER_FORMATS = {
    b"\x1f\x8b": "a gzip file; name it *.jsonl.gz",
    b"PAR1": "a Parquet file; name it *.parquet",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"version https://git-lfs": "a pointer of Git LFS; get the file: git lfs pull",
}
"""First bytes of files that are no JSONL, and what to do."""


class BadRowError(DataError):
    """One row that cannot be used; `reason` is its kind, by which dropped rows are counted."""

    def __init__(self, message: str, *, reason: str) -> None:
        self.reason = reason
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _bad_row, (str(self), self.reason)


def _bad_row(message: str, reason: str) -> BadRowError:
    return BadRowError(message, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a file. `place` is its name in messages: file and 1-based row (for JSONL: line)."""

    index: int  # 0-based, among the rows of all files
    place: str
    fields: dict[str, Any]
    folder: Path = Path()  # of the file, for paths in its fields

    def find(self, key: str) -> Any:
        """The value of a field, or of `outer.inner` within an object; None: there is none, or it is null."""
        value: Any = self.fields.get(key, _MISSING)
        if value is not _MISSING or "." not in key:
            return None if value is _MISSING else value
        value = self.fields
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def get(self, key: str, *, setting: str) -> Any:
        """Returns the value of a field; `setting` is the config key of its name.

        Raises:
            BadRowError: the row has no such field, or it is null.
        """
        value = self.find(key)
        if value is None:
            found = "null" if key in self.fields else f"fields {', '.join(self.fields) or 'none'}"
            raise self.error(
                f"have a field {key!r}, got {found}; correct {setting} or the file", reason=f"no field {key!r}"
            )
        return value

    def error(self, rule: str, *, reason: str) -> BadRowError:
        """The error that this row breaks a rule: `have ..., got ...; what to do`."""
        return BadRowError(f"{self.place} must {rule}", reason=reason)


def parse_line(line: bytes, *, file: Path, index: int, number: int) -> Row:
    """Parses a line of a JSONL file.

    Args:
        index: of the row, from 0.
        number: of the line, from 1, for messages.

    Raises:
        BadRowError: the line is no JSON object.
        DataError: the file is of another format.
    """
    place = f"{file} row {number}"

    def error(text: str, reason: str) -> BadRowError:
        return BadRowError(f"{place} must be {text}", reason=reason)

    if len(line) > MAX_ROW_BYTES:
        raise error(f"at most {MAX_ROW_BYTES} bytes long, got more; split or remove the row", "too many bytes")
    for start, found in _OTHER_FORMATS.items():
        if number == 1 and line.startswith(start):
            raise DataError(f"{place} must be a JSON object, got {found}")
    try:
        # A byte order mark of UTF-8 is allowed at the start of a file.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as cause:
        raise error(_encoding_rule(line, cause, file), "no UTF-8") from cause
    if "\0" in text:
        raise error(f"JSON without NUL characters, got {_start(line)}; the file is damaged", "NUL characters")
    repeated: list[str] = []

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return found

    try:
        fields = json.loads(text, object_pairs_hook=to_object)
    except (ValueError, RecursionError) as cause:
        raise error(_json_rule(line, cause), "no JSON") from cause
    if not isinstance(fields, dict):
        raise error(f"a JSON object, got {json_type(fields)}; write one object per line", "no JSON object")
    if repeated:
        raise error(f"an object that has each key once, got {repeated[0]!r} twice; remove one", "duplicate keys")
    return Row(index=index, place=place, fields=fields, folder=file.parent)


def json_type(value: Any) -> str:
    """The name of a value's type in JSON, for messages; a type that JSON lacks has its name in Python."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def no_rows(path: str, number: int | None) -> DataError:
    """The error that a path selects none of the `number` rows of its files; None: they were not all counted."""
    if number is None:
        found = "its slice selects no row"
    else:
        found = f"its slice selects none of {count_noun(number, 'row')}" if number else "it has no rows"
    return no_usable_prompt(path, found)


def no_usable_prompt(source: str, reason: str) -> DataError:
    """The error that files give no prompt."""
    return DataError(f"{source} must have at least one usable prompt, got none; {reason}")


def check_unique_names(names: Sequence[str], file: Path) -> None:
    """Raises DataError if two columns of a file have the same name."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{file} must have each column once, got {repeated[0]!r} twice; rename one")


def _encoding_rule(line: bytes, cause: UnicodeDecodeError, file: Path) -> str:
    for mark, name in _BYTE_ORDER_MARKS.items():
        if line.startswith(mark):
            return (
                f"a JSON object in UTF-8, got {name.upper()}; convert it: iconv -f {name} -t utf-8 {file} > rows.jsonl"
            )
    found = _start(line[max(0, cause.start - 20) :])
    return f"a JSON object in UTF-8, got {found}; {cause.reason} at byte {cause.start + 1} of the row"


def _json_rule(line: bytes, cause: Exception) -> str:
    if isinstance(cause, RecursionError):
        return f"a JSON object, got {_start(line)}, which is nested too deeply; remove the row"
    if line.strip() in (b"{", b"[", b"[{") or line.lstrip()[:1] == b"[":
        return (
            f"a JSON object in one line, got {_start(line)} of a pretty-printed file; convert it: rlscale-data convert "
            "<file> rows.jsonl"
        )
    if "set_int_max_str_digits" in str(cause):
        return f"a JSON object, got {_start(line)}; write an integer of so many digits as a string"
    # The message of the parser names line 1, or 2 at the end of the row, which is no line of the file.
    found = f"{cause.msg} (character {cause.pos + 1})" if isinstance(cause, json.JSONDecodeError) else _one_line(cause)
    return f"a JSON object, got {_start(line)}; {found}"


def _start(line: bytes) -> str:
    return repr(line[:_SHOWN].rstrip(b"\r\n").decode("utf-8", "backslashreplace"))


def _one_line(cause: Exception) -> str:
    return " ".join(str(cause)[:200].split())
