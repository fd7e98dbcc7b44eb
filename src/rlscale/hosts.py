"""Names and addresses of hosts, and calls that do not reach them."""

import ipaddress
import os
import socket

LOOPBACK = "127.0.0.1"
"""The host of servers that only this machine reaches."""


def is_loopback(host: str) -> bool:
    """Reports whether only this machine can reach a server bound to `host`. Resolves no other name than localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def describe_call_error(error: BaseException) -> str:
    """The reason why a call to a server failed, for "... must answer, got ...".

    A connection error of aiohttp becomes e.g. "connection refused at 127.0.0.1:8889". Its own text repeats the address
    and says "ssl:default" of connections without TLS.
    """
    system = getattr(error, "os_error", None)
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    if not isinstance(system, OSError) or not system.errno or host is None or port is None:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    # asyncio writes the address in place of the reason, but not for names that cannot be resolved.
    reason = system.strerror if isinstance(system, socket.gaierror) else os.strerror(system.errno)
    proxy = "the proxy " if type(error).__name__ == "ClientProxyConnectionError" else ""
    return f"{(reason or 'no connection').lower()} at {proxy}{join_host_port(host, port)}"
