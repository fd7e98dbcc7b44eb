"""The form of addresses in the config: `host:port`, with an IPv6 address in brackets, and URLs of servers."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from rlscale.hosts import is_loopback

EXAMPLE = "10.0.0.1:30000"
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_NUMERIC = re.compile(r"[0-9.]+")
MAX_PORT = 65535


def advise_address(text: str, *, example: str = EXAMPLE) -> str | None:
    """Advice to correct an address that is not `host:port`; None: it is one.

    Args:
        example: an address that fits the key.
    """
    if is_address(text):
        return None
    host, _, port = text.rpartition(":")
    candidates = [_without_url(text)]
    if _is_ip(host.strip("[]")):
        candidates.append(f"[{host.strip('[]')}]:{port}")
    meant = next((candidate for candidate in candidates if is_address(candidate)), None)
    return f"write {meant}" if meant is not None else f"write e.g. {example}"


def is_address(text: str) -> bool:
    """Whether `text` is `host:port`: a name, an IPv4 address or an IPv6 address in brackets, and a port above 0."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= MAX_PORT or len(port) > len(str(MAX_PORT)):
        return False
    if host.startswith("[") and host.endswith("]"):
        return _is_ip(host[1:-1]) and ":" in host
    # Digits and dots alone are an IPv4 address, whose numbers have a range.
    return _is_ip(host) and ":" not in host if _NUMERIC.fullmatch(host) else _NAME.fullmatch(host) is not None


def advise_url(text: str, *, example: str) -> str | None:
    """Advice to correct what is not the URL of an HTTP server; None: it is one.

    A user, a password and a query, which may be secret, are in no advice.

    Args:
        example: a URL that fits the key.
    """
    if is_url(text):
        return None
    meant = f"http://{public_url(text)}"
    return f"write {meant}" if "://" not in text and is_url(meant) else f"write e.g. {example}"


def is_url(text: str) -> bool:
    """Whether `text` is `http://host`, also https and with a port and a path."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", 80 if parts.port is None else parts.port
    except ValueError:  # e.g. a port that is no number or too large
        return False
    if parts.scheme not in ("http", "https") or any(map(str.isspace, text)):
        return False
    return is_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def public_url(text: str) -> str:
    """A URL without user, password and query."""
    scheme, separator, server = text.rpartition("://")
    return scheme + separator + server.rpartition("@")[2].partition("?")[0]


def is_plain_url(text: str) -> bool:
    """Whether `text` is the URL of a server, perhaps with a login and a path, and without a query."""
    return is_url(text) and not urlsplit(text).query and not urlsplit(text).fragment


def proxy_for(url: str, proxy: str | None) -> str | None:
    """`network.http_proxy` for a server that the run did not start; None for one on this machine."""
    return None if is_loopback(urlsplit(url).hostname or "") else proxy


def _without_url(text: str) -> str:
    """The host and port of a URL."""
    try:
        return urlsplit(text).netloc if "://" in text else text.rstrip("/")
    except ValueError:
        return ""


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
