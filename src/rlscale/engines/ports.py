"""Free ports for servers that receive their port as an argument."""

import random
import socket
import sys
from pathlib import Path

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
FIRST_PORT = 20_000  # lower ports belong to Ray workers and well-known services
MAX_TRIES = 100

_reserved: list[socket.socket] = []
"""Marks of the ports that this process has reserved; the kernel removes them with the process."""


def free_port(host: str, *, number: int = 1) -> int:
    """Finds a free port of `host`, an address of this machine; with `number` the first of so many consecutive ones.

    The port is below the ephemeral range, from which the kernel assigns ports to connections: until the server listens,
    seconds may pass in which any connection of any process could get an ephemeral port. Ray draws ports for its
    servers above that range.
    """
    port, marks = _find(host, number)
    for mark in marks:
        mark.close()
    return port


def reserve_port(host: str, *, number: int = 1) -> int:
    """Finds a port like `free_port` and reserves it: no process of this machine gets it again while this one lives."""
    port, marks = _find(host, number)
    _reserved.extend(marks)
    return port


def port_fault(host: str, port: int) -> str | None:
    """The reason why a server cannot listen at a port of `host`, 0 for any; None: it can."""
    try:
        with socket.socket(_family(host)) as probe:
            # As servers do: connections of a server that has ended do not keep its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _find(host: str, number: int) -> tuple[int, list[socket.socket]]:
    """The first of `number` free consecutive ports, and the marks of all of them."""
    candidates = range(FIRST_PORT, _first_ephemeral_port())
    generator = random.SystemRandom()  # a seeded one would draw the same ports in other processes
    for port in generator.sample(candidates, min(MAX_TRIES, len(candidates))):
        marks = [mark for i in range(number) if (mark := _mark(port + i)) is not None]
        if len(marks) == number and all(_is_free(host, port + i) for i in range(number)):
            return port, marks
        for mark in marks:
            mark.close()
    # No candidate is free: the kernel chooses an ephemeral port.
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1]), []


def _mark(port: int) -> socket.socket | None:
    """A socket that marks a port as reserved for this process; None: another process has reserved it.

    Its name is in Linux's abstract namespace: seen by every process of this network, and gone with the process.
    Elsewhere it marks nothing.
    """
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            mark.bind(f"\0rlscale-port-{port}")
        except OSError:
            mark.close()
            return None
    return mark


def _first_ephemeral_port() -> int:
    """The first port of the range from which the kernel assigns ports to connections."""
    try:
        return int(EPHEMERAL_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except OSError:
        return 49_152  # start of IANA's dynamic ports, used by other systems


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
