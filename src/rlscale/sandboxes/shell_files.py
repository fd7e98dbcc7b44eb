"""Reads and writes files of a sandbox with a shell in it; exit codes are error numbers."""

import errno
import os

READ_SCRIPT = f"""
[ -e "$1" ] || exit {errno.ENOENT}
[ -d "$1" ] && exit {errno.EISDIR}
[ -f "$1" ] || exit {errno.EINVAL}
[ -r "$1" ] || exit {errno.EACCES}
exec cat -- "$1"
"""
WRITE_SCRIPT = f"""
[ -d "$1" ] && exit {errno.EISDIR}
[ -e "$1" ] && [ ! -f "$1" ] && exit {errno.EINVAL}
mkdir -p -- "$(dirname -- "$1")" || exit {errno.EACCES}
cat > "$1" || exit {errno.ENOSPC}
"""


def file_error(code: int | None, path: str) -> OSError:
    """The error of a script that ended with this code."""
    if code is None or code >= 128:
        return OSError(f"{path}: ended by the limits of the sandbox")
    return OSError(code, os.strerror(code), path)
