"""The socket on which rank 0 of a world waits for the others. Without torch: it listens before torch is imported."""

import socket


def listen(address: str, *, port: int = 0) -> socket.socket:
    """A socket that listens at `address` and nowhere else; port 0 takes one that is free.

    Raises OSError when the port is taken.
    """
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=4096)
