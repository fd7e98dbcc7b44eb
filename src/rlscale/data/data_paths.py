"""Where data files are: `<path>[@[a:b]]`, where the path may begin with `builtin:`."""

import re
from pathlib import Path

BUILTIN = "builtin:"
_SLICE = re.compile(r"@\[(\d*):(\d*)\]$")
_PACKAGE = Path(__file__).resolve().parents[1]


def resolve_data_path(path: str) -> Path:
    """The file that `path` means, without looking whether it is there; a row slice at its end is left out.

    `builtin:arithmetic/train.jsonl` is a file that comes with rlscale: in the installed package, or in `data/` of a
    checkout.
    """
    path = _SLICE.sub("", path)
    if path.startswith(BUILTIN):
        return _builtin_root() / path.removeprefix(BUILTIN)
    return Path(path).expanduser()


def row_slice(path: str) -> slice:
    """The rows that `@[a:b]` at the end of `path` selects, counted from 0, b not included; without it all rows."""
    match = _SLICE.search(path)
    if match is None:
        return slice(None)
    start, stop = (int(text) if text else None for text in match.groups())
    return slice(start, stop)


def _builtin_root() -> Path:
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / "data"
