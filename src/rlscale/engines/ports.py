"""Ports for servers that are told theirs before they start."""

import random
import socket
from pathlib import Path

KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
FIRST, LAST = 20_000, 65_535  # below are those of Ray and of well-known services
NUM_TRIES = 100


def free_port(host: str) -> int:
    """A port of `host`, an address of this machine, that nothing listens on now.

    It lies outside of the range from which the kernel gives ports to connections: between this call and the moment
    when the server listens seconds may pass, in which any connection of any process could be given one of those.
    """
    ours = _outside(*_range_of_kernel())
    draw = random.SystemRandom()  # other processes draw as well, and a seeded generator would draw the same
    for port in draw.sample(ours, min(NUM_TRIES, len(ours))):
        if _is_free(host, port):
            return port
    with socket.socket() as probe:  # where the kernel's range is all there is
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _range_of_kernel() -> tuple[int, int]:
    try:
        first, last = map(int, KERNELS_RANGE.read_text(encoding="ascii").split())
    except OSError:
        return 49_152, LAST  # IANA's dynamic ports, which other systems take
    return first, last


def _outside(first: int, last: int) -> list[int]:
    return [*range(FIRST, min(first, LAST + 1)), *range(max(FIRST, last + 1), LAST + 1)]


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
