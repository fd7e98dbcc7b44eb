"""Queries the interpreter of SGLang once, before the first unit test.

Every config of an SGLang server needs its packages. The query starts a process, which a unit test may not do, and its
result is cached.
"""

import contextlib
import subprocess

from rlscale.config.passthrough.sglang_python import find_python, installed_packages

with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
    installed_packages(find_python(None))
