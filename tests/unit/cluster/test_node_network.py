"""Interfaces of the addresses of this machine."""

import os

import pytest

from rlscale.cluster import node_network
from rlscale.cluster.node_network import find_interface, interfaces, listen_address, use_node_interface


def test_the_interface_of_an_address_is_found() -> None:
    assert find_interface("127.0.0.1") in interfaces()
    assert find_interface("203.0.113.7") is None  # an address of documentation, on no machine


def test_servers_that_others_reach_listen_at_the_address_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_network.ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    assert listen_address(public=True) == "10.1.2.3"
    assert listen_address(public=False) == "127.0.0.1"


def test_collectives_use_the_interface_of_that_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = find_interface("127.0.0.1")
    monkeypatch.setattr(node_network.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    # Set first, so that the fixture removes the variable that the function sets.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    use_node_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={name}"
