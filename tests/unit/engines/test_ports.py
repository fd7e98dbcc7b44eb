"""Ports that stay free until their server listens."""

import socket
from pathlib import Path

import pytest

from rlscale.engines import ports
from rlscale.engines.ports import free_port

HOST = "127.0.0.1"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the kernel says what range it gives ports from."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE_FILE", file)
    return file


def test_no_connection_is_given_the_port_meanwhile(kernels: Path) -> None:
    kernels.write_text("20040\t65500\n")
    drawn = {free_port(HOST) for _ in range(300)}
    assert drawn <= set(range(20000, 20040)) and len(drawn) > 20


def test_a_port_that_somebody_listens_on_is_not_given(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, free_port(HOST))) as taken:
        port = taken.getsockname()[1]
        kernels.write_text(f"{port + 2} 65535\n")
        monkeypatch.setattr(ports, "FIRST_PORT", port)  # two to draw from, of which one is taken
        assert {free_port(HOST) for _ in range(50)} == {port + 1}


@pytest.mark.parametrize("said", ["1024 65535", None])
def test_where_the_kernel_may_give_any_or_says_nothing_there_is_a_port_too(kernels: Path, said: str | None) -> None:
    if said is not None:
        kernels.write_text(said)
    with socket.create_server((HOST, free_port(HOST))) as server:
        assert server.getsockname()[1] > 1023
