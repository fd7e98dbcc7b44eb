"""Socket on which rank 0 of a world waits for the others.

Without torch: rank 0 listens, and the other ranks start, before it imports torch, which takes seconds.
"""

import socket


def listen(address: str, *, port: int = 0) -> socket.socket:
    """A socket that listens at `address` only; port 0 selects a free one.

    Raises OSError when the port is in use.
    """
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=4096)
