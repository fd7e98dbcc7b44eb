"""Hosts that only this machine can reach."""

import ipaddress

LOOPBACK = "127.0.0.1"
"""The host of servers that only this machine reaches."""


def is_loopback(host: str) -> bool:
    """Reports whether only this machine can reach a server bound to `host`. Resolves no other name than localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
