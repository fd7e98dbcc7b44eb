"""Ports for servers that are told theirs before they start."""

import random
import socket
from pathlib import Path

KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
FIRST = 20_000  # below are those of Ray's workers and of well-known services
NUM_TRIES = 100


def free_port(host: str) -> int:
    """A port of `host`, an address of this machine, that nothing listens on now.

    It lies below the range from which the kernel gives ports to connections: between this call and the moment when the
    server listens seconds may pass, in which any connection of any process could be given one of those. Above that
    range Ray draws the ports of its own servers.
    """
    ours = range(FIRST, _first_of_kernel())
    draw = random.SystemRandom()  # other processes draw as well, and a seeded generator would draw the same
    for port in draw.sample(ours, min(NUM_TRIES, len(ours))):
        if _is_free(host, port):
            return port
    with socket.socket() as probe:  # where there are none below
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_of_kernel() -> int:
    """The first port of the range from which the kernel gives some to connections."""
    try:
        return int(KERNELS_RANGE.read_text(encoding="ascii").split()[0])
    except OSError:
        return 49_152  # that of IANA's dynamic ports, which other systems take


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
