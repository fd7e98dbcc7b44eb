"""Connections of this network namespace, as the kernel lists them."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ESTABLISHED = 1
KEEPALIVE = 2  # the timer of an idle connection that is probed


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One end of a connection: numbers of the kernel."""

    state: int
    timer: int


def connections_to(url: str) -> list[Connection]:
    """The clients' ends of all connections to the server at this URL."""
    port, found = urlsplit(url).port, []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, _, timer, *_ = line.split()
        if int(remote.split(":")[1], 16) == port:
            found.append(Connection(state=int(state, 16), timer=int(timer.split(":")[0], 16)))
    return found
