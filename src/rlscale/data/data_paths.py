"""Paths of data files: `<path>[@[start:stop:step]]`; the path may be a glob, or start with `builtin:`."""

import glob
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from rlscale.errors import DataError

BUILTIN = "builtin:"
JSONL, GZ, PARQUET = ".jsonl", ".gz", ".parquet"
SUFFIXES = (JSONL, f"{JSONL}{GZ}", PARQUET)
"""Endings of the files that can be read."""

_SLICE = re.compile(r"@\[(-?\d{0,40}):(-?\d{0,40})(?::(-?\d{0,40}))?\]$")
_LIKE_SLICE = re.compile(r"@\[[^\[\]/]*\]$")
_GLOB = re.compile(r"[*?\[]")
_PACKAGE = Path(__file__).resolve().parents[1]
_CONVERTIBLE = (".json", ".csv", ".tsv")
NAMED_FILES = 3
"""Files of a folder that a message names."""


def resolve_data_path(path: str) -> Path:
    """Resolves `path` without its row slice to a file, which may not exist, or to a glob.

    `builtin:arithmetic/train.jsonl` is a file of rlscale: in the installed package, or in `data/` of a checkout.
    """
    path = _SLICE.sub("", path)
    if path.startswith(BUILTIN):
        return _builtin_root() / path.removeprefix(BUILTIN)
    return Path(os.path.expanduser(path))


def row_slice(path: str) -> slice:
    """The rows selected by `@[start:stop:step]` at the end of `path`, as of a Python list; without it all rows.

    Raises:
        DataError: the end of the path looks like a slice and is none.
    """
    match = _SLICE.search(path)
    if match is None:
        if _LIKE_SLICE.search(path) and not Path(os.path.expanduser(path)).exists():
            found = _LIKE_SLICE.search(path)
            raise DataError(
                f"{path} must end in a slice as @[start:stop] or @[start:stop:step], got {found and found[0]}; "
                "write integers of at most 40 digits, e.g. @[0:100]"
            )
        return slice(None)
    start, stop, step = (int(text) if text not in (None, "", "-") else None for text in match.groups())
    if step == 0:
        raise DataError(f"{path} must have a slice with a step that is not 0, got 0; remove the step")
    return slice(start, stop, step)


def find_data_files(path: str) -> list[Path]:
    """The files of a path, those of a glob in the order of their names. Opens none of them.

    Raises:
        DataError: there is none, or one is no file of a known format; the message names what to do.
    """
    file = resolve_data_path(path)
    row_slice(path)
    if _exists(file) or not _GLOB.search(str(file)):
        return [check_data_file(file)]
    found = sorted(Path(name) for name in glob.glob(str(file), recursive=True))
    if not found:
        raise DataError(f"{path} must match at least one file, got none for {file.absolute()}; check the pattern")
    return [check_data_file(each) for each in found]


def is_missing(path: str) -> bool:
    """Whether a path without glob names nothing that exists."""
    file = resolve_data_path(path)
    return not _exists(file) and not _GLOB.search(str(file))


def is_parquet(path: str | None) -> bool:
    """Whether a path, or a glob, names Parquet files."""
    return path is not None and resolve_data_path(path).suffix == PARQUET


def check_data_file(file: Path) -> Path:
    """Returns the file.

    Raises:
        DataError: it is no regular file of a known format; the message names what to do.
    """
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"{file} must be a file, got nothing at {file.absolute()}; check the path") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{str(file)[:200]!r} must be a file that can be read; {error}") from error
    if stat.S_ISDIR(mode):
        raise DataError(f"{file} must be a file, got a folder; {files_to_name(file)}")
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{file} must be a regular file, got a {_kind(mode)}, which can be read only once; copy it to a file: "
            f"cat {file} > rows.jsonl"
        )
    if not file.name.endswith(SUFFIXES):
        raise DataError(
            f"{file} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {file.suffix or 'no ending'!r}; "
            f"{_conversion(file)}"
        )
    return file


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except (OSError, ValueError):  # too long, or with a NUL: reported when the file is checked
        return True


def _conversion(file: Path) -> str:
    if file.suffix in _CONVERTIBLE:
        return f"convert it: rlscale-data convert {file} {file.with_suffix(JSONL)}"
    return "rename it if it has one JSON object per line, else convert it"


def files_to_name(folder: Path) -> str:
    """Advice about a folder: the glob of its data files."""
    for suffix in SUFFIXES:
        found = sorted(each.name for each in folder.glob(f"*{suffix}"))
        if found:
            return f"name its files: {folder}/*{suffix} ({_some(found)})"
    return "name a file; the folder has no data files"


def _some(names: Sequence[str]) -> str:
    others = len(names) - NAMED_FILES
    return ", ".join(names[:NAMED_FILES]) + (f" and {others} more" if others > 0 else "")


def _kind(mode: int) -> str:
    return "fifo" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def _builtin_root() -> Path:
    packaged = _PACKAGE / "_data"
    # A wheel contains the data folder as `_data`.
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / "data"
