"""Free ports for servers that receive their port as an argument."""

import random
import socket
from pathlib import Path

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
FIRST_PORT = 20_000  # lower ports belong to Ray workers and well-known services
MAX_TRIES = 100


def free_port(host: str) -> int:
    """Finds a free port of `host`, an address of this machine.

    The port is below the ephemeral range, from which the kernel assigns ports to connections: until the server listens,
    seconds may pass in which any connection of any process could get an ephemeral port. Ray draws ports for its
    servers above that range.
    """
    candidates = range(FIRST_PORT, _first_ephemeral_port())
    generator = random.SystemRandom()  # a seeded one would draw the same ports in other processes
    for port in generator.sample(candidates, min(MAX_TRIES, len(candidates))):
        if _is_free(host, port):
            return port
    # No candidate is free: the kernel chooses an ephemeral port.
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
    """The first port of the range from which the kernel assigns ports to connections."""
    try:
        return int(EPHEMERAL_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except OSError:
        return 49_152  # start of IANA's dynamic ports, used by other systems


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
