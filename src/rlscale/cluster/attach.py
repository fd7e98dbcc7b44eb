"""Joining a Ray cluster that somebody else has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from rlscale.errors import ConfigError, Problem

KNOCK_S = 10.0
AUTH_MODE = "RAY_AUTH_MODE"


def attach(address: str, options: Mapping[str, Any]) -> None:
    """Connects to the cluster at `address`. `options` are those of `ray.init`.

    Raises:
        ConfigError: nobody answers there, or not to somebody without a token.
    """
    try:
        _check_reachable(address)
        _take_token(address)
        ray.init(address=address, **options)
    except ConnectionError as error:
        fix = "start one with `ray start --head`, or leave it out to start one here"
        if os.environ.get(AUTH_MODE) is None and _place_of(address) is not None:
            fix += f"; a cluster with a token takes {AUTH_MODE}=token and its RAY_AUTH_TOKEN in the environment"
        problem = Problem(
            path="cluster.ray_address",
            rule="name a Ray cluster that answers",
            value=address,
            fix=f"{fix} ({error})",
        )
        raise ConfigError([problem]) from error


def _check_reachable(address: str) -> None:
    """Raises ConnectionError where nobody listens: Ray itself takes over a minute to say so."""
    place = _place_of(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nobody answers there: {error}") from error


def _take_token(address: str) -> None:
    """Has Ray use this user's token where the cluster is on this machine.

    Every Ray that was started here has one as soon as there is a token, which a run without an address leaves behind.
    Ray finds it for `auto` alone; and to another machine nobody's token is sent unasked.
    """
    place = _place_of(address)
    if AUTH_MODE in os.environ or place is None or not _is_here(place[0]):
        return
    with suppress(ImportError):  # of a Ray that knows no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _place_of(address: str) -> tuple[str, int] | None:
    """Host and port; None for `auto`, or a name that Ray knows."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: only those can be listened at."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(place)
    except OSError:
        return False
    return True
