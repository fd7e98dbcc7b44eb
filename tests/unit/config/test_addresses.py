"""The form of addresses in the config."""

import pytest

from rlscale.config.addresses import advise_address, advise_url, is_address, is_url, public_url
from rlscale.hosts import is_loopback


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:30000", "engine-3.cluster.local:1", "localhost:65535", "[::1]:3", "[2001:db8::7]:30000", "node_1:80"],
)
def test_these_are_addresses(address: str) -> None:
    assert is_address(address) and advise_address(address) is None


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("http://10.0.0.1:30000", "write 10.0.0.1:30000"),
        ("https://host:30000/v1", "write host:30000"),
        ("http://[::1]:30000", "write [::1]:30000"),
        ("host:80/", "write host:80"),
        ("::1:30000", "write [::1]:30000"),
        ("http://host", "write e.g. 10.0.0.1:30000"),
        ("http://[::1", "write e.g. 10.0.0.1:30000"),
        ("host", "write e.g. 10.0.0.1:30000"),
        ("host:", "write e.g. 10.0.0.1:30000"),
        (":30000", "write e.g. 10.0.0.1:30000"),
        ("host:0", "write e.g. 10.0.0.1:30000"),
        ("host:65536", "write e.g. 10.0.0.1:30000"),
        ("host:-1", "write e.g. 10.0.0.1:30000"),
        ("host:000000001", "write e.g. 10.0.0.1:30000"),
        ("10.0.0.256:30000", "write e.g. 10.0.0.1:30000"),
        ("10.0.0:30000", "write e.g. 10.0.0.1:30000"),
        ("[10.0.0.1]:30000", "write e.g. 10.0.0.1:30000"),
        ("[::g]:30000", "write e.g. 10.0.0.1:30000"),
        ("my host:30000", "write e.g. 10.0.0.1:30000"),
        ("-host:30000", "write e.g. 10.0.0.1:30000"),
        ("", "write e.g. 10.0.0.1:30000"),
    ],
)
def test_these_are_not(address: str, advice: str) -> None:
    assert not is_address(address) and advise_address(address) == advice


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:8443/a/b?c=d", "http://user:word@10.0.0.1:80/x", "http://[::1]:8000/score"]
)
def test_these_are_urls(url: str) -> None:
    assert is_url(url) and advise_url(url, example="http://h/x") is None


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("10.0.0.1:80/x", "write http://10.0.0.1:80/x"),
        ("u:secret@h/x?key=secret", "write http://h/x"),
        ("http://", "write e.g. http://h/x"),
        ("http://h:0", "write e.g. http://h/x"),
        ("http://h:99999", "write e.g. http://h/x"),
        ("http://h:port", "write e.g. http://h/x"),
        ("http://[::1", "write e.g. http://h/x"),
        ("http://my host/x", "write e.g. http://h/x"),
        ("ftp://h/x", "write e.g. http://h/x"),
        ("", "write e.g. http://h/x"),
    ],
)
def test_these_are_no_urls(url: str, advice: str) -> None:
    assert not is_url(url) and advise_url(url, example="http://h/x") == advice
    assert "secret" not in public_url(url)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.5.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("node1", False),
    ],
)
def test_a_loopback_address_is_reached_from_this_machine_only(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local
