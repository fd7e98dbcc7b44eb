"""Ray's token, with which every Ray of a user on a machine authenticates its processes."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

AUTH_MODE = "RAY_AUTH_MODE"


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


def enable_token(host: str) -> None:
    """Makes Ray use this user's token for a cluster on this machine.

    A run without an address creates a token, and every Ray that is started on this machine afterwards requires it. Ray
    itself looks for it with the address `auto` only. A token is never sent to another machine without being asked for.
    """
    if AUTH_MODE in os.environ or not is_local(host):
        return
    with suppress(ImportError):  # an older Ray has no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: a socket can be bound to no other."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(place)
    except OSError:
        return False
    return True
