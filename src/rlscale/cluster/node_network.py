"""Network address of the node of an actor, and the interface that has it."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

import ray

from rlscale.hosts import LOOPBACK

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_REQUEST_BYTES = 40  # of struct ifreq
_IPV6_FILE = Path("/proc/net/if_inet6")


def node_address() -> str:
    """Address of this node for the others: the one with which it joined Ray.

    The address of the host name may be loopback (Debian's /etc/hosts), or that of a network which no other node has.
    """
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def listen_address(*, public: bool) -> str:
    """The address at which a server of this node listens: that of the node, or loopback for this machine alone."""
    return node_address() if public else LOOPBACK


def use_node_interface() -> None:
    """Makes gloo and NCCL of this process and its children use the interface of `node_address`.

    Variables that the user set take precedence.
    """
    interface = find_interface(node_address())
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Without `=` NCCL takes the name as a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def find_interface(address: str) -> str | None:
    """The name of the network interface that has `address`; None: no interface has it, or the system is not Linux."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        return _find_ipv6(wanted)
    return next((name for name in interfaces() if _ipv4_of(name) == str(wanted)), None)


def interfaces() -> tuple[str, ...]:
    """Names of the network interfaces of this node."""
    return tuple(name for _, name in socket.if_nameindex())


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("B", struct.pack(f"{_REQUEST_BYTES}s", interface.encode()))
        try:
            fcntl.ioctl(any_socket, _GET_ADDRESS, request)
        except OSError:
            return None  # it has no IPv4 address
    # 16 bytes of the name; then a sockaddr_in with the address at its bytes 4 to 8.
    return socket.inet_ntoa(request[20:24].tobytes())


def _find_ipv6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if not _IPV6_FILE.exists():
        return None
    for line in _IPV6_FILE.read_text(encoding="ascii").splitlines():
        digits, *_, name = line.split()
        if ipaddress.IPv6Address(int(digits, 16)) == wanted:
            return name
    return None
