"""Keeps secrets off command lines, which every user of a machine can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rlscale.observe.provenance import is_secret

VARIABLE = "RLSCALE_SECRET_{number}"


def hide_secrets() -> None:
    """Starts this command anew when its words hold a secret: then they name a variable of its environment instead.

    What other programs record of a command line (Ray, trackers) holds no secret then either.
    """
    words, variables = move_secrets(sys.argv[1:])
    if not variables:
        return
    # All that Python itself was told, and the words replaced.
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    os.execve(sys.executable, [sys.executable, *before, *words], {**os.environ, **variables})


def move_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words with references in place of secrets, and the variables that these refer to.

    Example:
        move_secrets(["logging.wandb.key=abc"])
        # ["logging.wandb.key=${oc.env:RLSCALE_SECRET_0}"], {"RLSCALE_SECRET_0": "abc"}
    """
    moved: list[str] = []
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        text = _unquoted(value)
        if equals and is_secret(name) and text not in ("", "null") and "${" not in text:
            variable = VARIABLE.format(number=len(variables))
            variables[variable] = text
            word = f"{name}=${{oc.env:{variable}}}"
        moved.append(word)
    return moved, variables


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
