"""TCP sockets that notice the loss of the other host.

A host that loses its power or its network closes no connection: without keepalive, a call that waits for its answer
waits until the timeout of the call, ten minutes by default.
"""

import socket
from typing import Any, TypeAlias

SILENCE_S = 30
"""Time after which a connection to a host that no longer acknowledges anything fails with ETIMEDOUT.

The kernel of a host acknowledges, so a process that computes for minutes keeps its connections.
"""

NUM_PROBES = 3
"""Probes of an idle connection that must stay unanswered: a lost packet is no lost host."""

AddressInfo: TypeAlias = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]
"""One result of `socket.getaddrinfo`."""


def open_socket(address: AddressInfo, *, silence_s: int = SILENCE_S) -> socket.socket:
    """Opens a socket that is not connected yet: the `socket_factory` of aiohttp's connectors.

    Args:
        silence_s: at least 4, because the kernel counts whole seconds between probes.
    """
    family, kind, protocol, *_ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    probe_s = silence_s // (NUM_PROBES + 1)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        # An idle connection: the first probe, and the following ones.
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silence_s - NUM_PROBES * probe_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES),
        # A connection with sent bytes that are not acknowledged: it is not idle, so that no probe is sent.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence_s),
    ):
        opened.setsockopt(level, option, value)
    return opened
