"""Connection to a Ray cluster that was started elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from rlscale.cluster.cluster_address import AUTO, KEY, ClusterAddress
from rlscale.cluster.ray_token import AUTH_MODE, enable_token
from rlscale.errors import ConfigError, Problem

CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 1.0
CLIENT = "ray://"


def running_cluster() -> str | None:
    """The address of the cluster that the last `ray start --head` on this machine started, if it still answers."""
    address = _recorded_address()
    if address is None:
        return None
    try:
        check_reachable(address, timeout_s=PROBE_TIMEOUT_S)
    except ConnectionError:
        return None
    return address


def attach(cluster: ClusterAddress, options: Mapping[str, Any]) -> None:
    """Connects to a cluster. `options` are arguments of `ray.init`.

    Raises:
        ConfigError: the address has no form that Ray knows, no cluster answers there, or it requires a token.
    """
    try:
        address = _resolve(cluster.address)
        check_reachable(address)
        if place := _host_and_port(address):
            enable_token(*place)
        ray.init(address=address, **options)
    except (ConnectionError, ValueError) as error:
        raise ConfigError([_problem(cluster, error)]) from error


def find_problems(cluster: ClusterAddress) -> list[Problem]:
    """Problems of an address that are known at once, without connecting to Ray.

    A machine that does not refuse the connection may still answer; then `attach` waits longer.
    """
    if ray.is_initialized():
        return []
    try:
        address = _resolve(cluster.address)
        if address != AUTO and not address.startswith(CLIENT) and _host_and_port(address) is None:
            raise ConnectionError("it is not of the form <host>:<port>")
        check_reachable(address, timeout_s=PROBE_TIMEOUT_S)
    except ConnectionError as error:
        return [] if isinstance(error.__cause__, TimeoutError) else [_problem(cluster, error)]
    return []


def check_reachable(address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raises ConnectionError when nothing listens at the address. Ray itself needs over a minute to report that."""
    place = _host_and_port(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=timeout_s).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing answers there: {error}") from error


def _problem(cluster: ClusterAddress, error: Exception) -> Problem:
    fix = f"start one with `ray start --head`, or leave the {_kind(cluster)} unset to start Ray here"
    if os.environ.get(AUTH_MODE) is None and _host_and_port(cluster.address) is not None:
        fix += f"; a cluster with a token needs {AUTH_MODE}=token and its RAY_AUTH_TOKEN in the environment"
    cause = " ".join(str(error).split())
    return Problem(
        path=cluster.source,
        rule="be the address of a running Ray cluster",
        value=cluster.address,
        fix=f"{fix} ({cause})",
    )


def _kind(cluster: ClusterAddress) -> str:
    return "key" if cluster.source == KEY else "environment variable"


def _recorded_address() -> str | None:
    """The address in Ray's file `ray_current_cluster`, which `ray start --head` writes and `ray stop` removes."""
    with suppress(ImportError):  # a private module, whose place may change
        from ray._private.utils import read_ray_address

        found: str | None = read_ray_address()
        return found or None
    return None


def _resolve(address: str) -> str:
    """An address, with `auto` replaced by that of the cluster that was started on this machine.

    Ray itself may choose the private Ray of another run, and waits for minutes for a cluster that has ended. It still
    gets `auto` on a machine that has joined a cluster.

    Raises:
        ConnectionError: no process of a cluster runs on this machine, or those of several, of which the recorded one
            has ended.
    """
    if address != AUTO:
        return address
    if found := running_cluster():
        return found
    with suppress(ImportError):  # a private module, whose place may change
        from ray._private.services import find_gcs_addresses

        others = sorted(find_gcs_addresses())  # type: ignore[no-untyped-call]
        if not others:
            raise ConnectionError("no Ray runs on this machine")
        if len(others) > 1 and (ended := _recorded_address()) is not None:
            raise ConnectionError(f"{ended} has ended, and several run on this machine: {', '.join(others)}")
    return AUTO


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port; None: `auto`, or a name that Ray resolves."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None
