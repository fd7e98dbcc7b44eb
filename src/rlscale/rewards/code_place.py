"""Place in the user's code of an exception, a crash or a stack."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DUMPED_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
MAX_CAUSE, MAX_TRACEBACK = 2000, 8000
"""Characters of a cause that are kept, the first ones, and of a traceback, the last ones."""


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Cause in one line, place in the user's code, and traceback without the frames of rlscale above it."""
    # Not str(error): it is user code and may itself fail; the traceback module handles that.
    cause = " ".join(traceback.format_exception_only(error)[-1].split())
    if len(cause) > MAX_CAUSE:
        cause = f"{cause[:MAX_CAUSE]} [{len(cause) - MAX_CAUSE} more characters are cut off]"
    # Lone surrogates have no tokens, and files cannot have them.
    cause = cause.encode(errors="backslashreplace").decode()
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, _skip_own_frames(error.__traceback__)))
    return cause, find_place([(f.filename, f.lineno or 0, f.name) for f in frames]), text[-MAX_TRACEBACK:]


def find_place(frames: Sequence[tuple[str, int, str]]) -> str:
    """The innermost frame of the user, `my_reward.py:3 in score`; else of a library; empty if all are of rlscale.

    Args:
        frames: file, line and function, the innermost last.
    """
    foreign = [frame for frame in frames if not frame[0].startswith((_PACKAGE, "<frozen"))]
    users = [frame for frame in foreign if not frame[0].startswith(_LIBRARIES)]
    chosen = users or foreign
    if not chosen:
        return ""
    file, line, name = chosen[-1]
    folder = f"{os.getcwd()}{os.sep}"
    return f"{file.removeprefix(folder)}:{line} in {name}"


def place_in_dump(text: str) -> str:
    """The place in the output of faulthandler, whose first frame is the innermost one."""
    found: Iterable[re.Match[str]] = _DUMPED_FRAME.finditer(text)
    return find_place([(m["file"], int(m["line"]), m["name"]) for m in found][::-1])


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return trace
