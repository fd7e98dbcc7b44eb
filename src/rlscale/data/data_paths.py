"""Paths of data files: `<path>[@[a:b]]`; the path may start with `builtin:`."""

import re
from pathlib import Path

BUILTIN = "builtin:"
_SLICE = re.compile(r"@\[(\d*):(\d*)\]$")
_PACKAGE = Path(__file__).resolve().parents[1]


def resolve_data_path(path: str) -> Path:
    """Resolves `path` without its row slice to a file, which may not exist.

    `builtin:arithmetic/train.jsonl` is a file of rlscale: in the installed package, or in `data/` of a checkout.
    """
    path = _SLICE.sub("", path)
    if path.startswith(BUILTIN):
        return _builtin_root() / path.removeprefix(BUILTIN)
    return Path(path).expanduser()


def row_slice(path: str) -> slice:
    """The rows selected by `@[a:b]` at the end of `path`, 0-based, b excluded; without it all rows."""
    match = _SLICE.search(path)
    if match is None:
        return slice(None)
    start, stop = (int(text) if text else None for text in match.groups())
    return slice(start, stop)


def _builtin_root() -> Path:
    packaged = _PACKAGE / "_data"
    # A wheel contains the data folder as `_data`.
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / "data"
