"""Ray's token, with which every Ray of a user on a machine authenticates its processes."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

AUTH_MODE = "RAY_AUTH_MODE"

_MODE_ENTRY = f"{AUTH_MODE}=".encode()
_GCS_ADDRESS = b"--gcs-address="


def create_token() -> None:
    """Creates this user's token, which a Ray without an address requires, unless there is one.

    Ray does this itself, but two runs that start at the same time would replace each other's token.
    """
    if os.environ.get(AUTH_MODE, "token").lower() != "token":
        return
    # ImportError: a Ray without tokens. OSError: the home folder cannot be written; then Ray reports it.
    with suppress(ImportError, OSError):  # imported here for the first of them
        from ray._private.authentication import authentication_token_setup as tokens

        # The user need not know of a new token; `ray.init` gets the same level later.
        logging.getLogger(tokens.__name__).setLevel(logging.ERROR)
        folder = Path.home() / ".ray"
        folder.mkdir(exist_ok=True)
        with (folder / "auth_token.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            loader = tokens.AuthenticationTokenLoader.instance()  # type: ignore[attr-defined]
            loader.reset_cache()
            if not loader.has_token(ignore_auth_mode=True):
                tokens.generate_and_save_token()
            loader.reset_cache()


def enable_token(host: str, port: int) -> None:
    """Makes Ray use this user's token for a cluster on this machine that requires it.

    A run without an address creates a token, and every Ray that is started on this machine afterwards requires it. Ray
    itself looks for it with the address `auto` only. A token is never sent to another machine without being asked for.
    """
    if AUTH_MODE in os.environ or not is_local(host) or not _may_require_token(port):
        return
    with suppress(ImportError):  # an older Ray has no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _may_require_token(port: int) -> bool:
    """Whether the Ray of this machine at a port may require a token, by the environment of its processes.

    A cluster that started before there was a token requires none, and a run that used one could not create actors:
    calls from the cluster to the run carry no token. True where the processes cannot be read.
    """
    modes = list(_auth_modes(port))
    return not modes or "token" in modes


def _auth_modes(port: int) -> Iterator[str]:
    """The authentication mode with which each raylet of a cluster started; Linux only."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            words = (folder / "cmdline").read_bytes().split(b"\0")
            addresses = [word for word in words if word.startswith(_GCS_ADDRESS)]
            if not words[0].endswith(b"raylet") or not addresses or addresses[0].rpartition(b":")[2] != b"%d" % port:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            yield next((each[len(_MODE_ENTRY) :].decode() for each in entries if each.startswith(_MODE_ENTRY)), "")


def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: a socket can be bound to no other."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(place)
    except OSError:
        return False
    return True
