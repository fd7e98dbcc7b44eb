"""Ports that connections do not use before the server listens."""

import socket
import sys
from pathlib import Path

import pytest

from rlscale.engines import ports
from rlscale.engines.ports import free_port, port_fault, reserve_port

HOST = "127.0.0.1"


@pytest.fixture
def range_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the ephemeral port range of the kernel."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE_FILE", file)
    return file


def test_ports_are_below_the_ephemeral_range(range_file: Path) -> None:
    range_file.write_text("20040\t65500\n")
    drawn = {free_port(HOST) for _ in range(300)}
    assert drawn <= set(range(20000, 20040)) and len(drawn) > 20


def test_a_port_in_use_is_skipped(range_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    range_file.write_text("32768 65535\n")  # above it any connection of this machine could use the second port
    with socket.create_server((HOST, free_port(HOST, number=2))) as taken:
        port = taken.getsockname()[1]
        range_file.write_text(f"{port + 2} 65535\n")
        monkeypatch.setattr(ports, "FIRST_PORT", port)  # two candidates, of which one is in use
        assert {free_port(HOST) for _ in range(50)} == {port + 1}


@pytest.mark.parametrize("content", ["1024 65535", None])
def test_without_candidates_or_range_file_a_port_is_found(range_file: Path, content: str | None) -> None:
    if content is not None:
        range_file.write_text(content)
    with socket.create_server((HOST, free_port(HOST))) as server:
        assert server.getsockname()[1] > 1023


def test_consecutive_ports_are_all_free(range_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    range_file.write_text("32768 65535\n")
    with socket.create_server((HOST, free_port(HOST, number=4))) as taken:
        port = taken.getsockname()[1]
        range_file.write_text(f"{port + 2} 65535\n")
        monkeypatch.setattr(ports, "FIRST_PORT", port - 1)
        # Of the three candidates the first two contain the port in use.
        assert {free_port(HOST, number=2) for _ in range(50)} == {port + 1}


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_a_port_of_an_ipv6_address_is_found() -> None:
    with socket.create_server(("::1", free_port("::1")), family=socket.AF_INET6) as server:
        assert server.getsockname()[1] > 1023


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux")
def test_a_reserved_port_is_not_given_again(range_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_reserved", kept := [])
    range_file.write_text("32768 65535\n")
    first = free_port(HOST, number=3)  # other programs of this machine may use some
    monkeypatch.setattr(ports, "FIRST_PORT", first)
    range_file.write_text(f"{first + 3} 65535\n")
    reserved = {reserve_port(HOST), reserve_port(HOST)}
    assert len(reserved) == len(kept) == 2
    assert {free_port(HOST) for _ in range(30)} == {first, first + 1, first + 2} - reserved
    for mark in kept:
        mark.close()
    assert len({free_port(HOST) for _ in range(100)}) == 3


def test_a_port_is_taken_while_a_server_listens_and_free_after_its_last_connection() -> None:
    with socket.create_server((HOST, free_port(HOST))) as server:
        port = server.getsockname()[1]
        assert port_fault(HOST, port) == "Address already in use"
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # first: this side keeps the address in TIME_WAIT
        client.close()
    assert port_fault(HOST, port) is None


def test_any_port_is_free_at_addresses_of_this_machine_only() -> None:
    assert port_fault(HOST, 0) is None
    assert port_fault("192.0.2.1", 0) == "Cannot assign requested address"  # of documentation, no machine has it
