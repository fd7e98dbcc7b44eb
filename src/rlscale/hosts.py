"""Names and addresses of hosts."""

import ipaddress

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
