"""Connection to a Ray cluster that was started elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from rlscale.errors import ConfigError, Problem

CONNECT_TIMEOUT_S = 10.0
AUTH_MODE = "RAY_AUTH_MODE"


def attach(address: str, options: Mapping[str, Any]) -> None:
    """Connects to the cluster at `address`. `options` are arguments of `ray.init`.

    Raises:
        ConfigError: no cluster answers there, or it requires a token.
    """
    try:
        _check_reachable(address)
        _enable_token(address)
        ray.init(address=address, **options)
    except ConnectionError as error:
        fix = "start one with `ray start --head`, or leave the key unset to start Ray here"
        if os.environ.get(AUTH_MODE) is None and _host_and_port(address) is not None:
            fix += f"; a cluster with a token needs {AUTH_MODE}=token and its RAY_AUTH_TOKEN in the environment"
        problem = Problem(
            path="cluster.ray_address",
            rule="be the address of a running Ray cluster",
            value=address,
            fix=f"{fix} ({error})",
        )
        raise ConfigError([problem]) from error


def _check_reachable(address: str) -> None:
    """Raises ConnectionError when nothing listens at the address. Ray itself needs over a minute to report that."""
    place = _host_and_port(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing answers there: {error}") from error


def _enable_token(address: str) -> None:
    """Makes Ray use this user's token for a cluster on this machine.

    A run without an address creates a token, and every Ray that is started on this machine afterwards requires it. Ray
    itself looks for it with the address `auto` only. A token is never sent to another machine without being asked for.
    """
    place = _host_and_port(address)
    if AUTH_MODE in os.environ or place is None or not _is_local(place[0]):
        return
    with suppress(ImportError):  # an older Ray has no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port; None: `auto`, or a name that Ray resolves."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: a socket can be bound to no other."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(place)
    except OSError:
        return False
    return True
