"""Keeps secrets off command lines, which every user of a machine can read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from rlscale.secrets import replace_secrets

VARIABLE = "RLSCALE_SECRET_{number}"
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


def hide_secrets() -> None:
    """Restarts this command when its arguments contain a secret, with an environment variable in place of the secret.

    So programs that record command lines (Ray, trackers) do not record secrets.
    """
    arguments, variables = move_secrets(sys.argv[1:])
    if not variables:
        return
    # Keep the arguments of Python itself (-m, -X ...), which come first in orig_argv.
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    os.execve(sys.executable, [sys.executable, *before, *arguments], {**os.environ, **variables})


def move_secrets(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments with references in place of secrets, and the variables they refer to.

    Example:
        move_secrets(["logging.wandb.key=abc", "train.env_vars={HF_TOKEN: xyz}"])
        # ["logging.wandb.key=${oc.env:RLSCALE_SECRET_0}", "train.env_vars={HF_TOKEN: ${oc.env:RLSCALE_SECRET_1}}"],
        # {"RLSCALE_SECRET_0": "abc", "RLSCALE_SECRET_1": "xyz"}
    """
    variables: dict[str, str] = {}

    def refer(value: str) -> str:
        text = _plain(value)
        if text in ("", "null") or "${" in text:
            return value
        variable = VARIABLE.format(number=len(variables))
        variables[variable] = text
        return f"${{oc.env:{variable}}}"

    return [replace_secrets(argument, refer) for argument in arguments], variables


def _plain(value: str) -> str:
    """The string that Hydra parses from a value with or without quotes."""
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace(f"\\{value[0]}", value[0])
    return _ESCAPED.sub(r"\1", value)
