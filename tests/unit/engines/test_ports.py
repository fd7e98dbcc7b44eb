"""Ports that connections do not use before the server listens."""

import socket
from pathlib import Path

import pytest

from rlscale.engines import ports
from rlscale.engines.ports import free_port

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
    with socket.create_server((HOST, free_port(HOST))) as taken:
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
