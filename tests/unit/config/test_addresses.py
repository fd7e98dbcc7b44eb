"""The form of addresses in the config."""

import pytest

from rlscale.config.addresses import advise_address, is_address


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
