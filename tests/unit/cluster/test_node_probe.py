"""Paths and ports of one node."""

import socket
from pathlib import Path

from rlscale.cluster.node_probe import _NodeProbe, list_files, read_folder
from rlscale.plan.node_facts import PRESENT, CheckedFolder, FixedPort, FolderUse


def test_files_are_compared_by_name_and_size(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("12")
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "below").mkdir()
    assert list_files(tmp_path) == "a.txt 1\nb.txt 2"
    assert list_files(tmp_path / "b.txt") == "b.txt 2"
    assert list_files(tmp_path / "gone") is None


def test_of_an_interpreter_only_the_existence_counts(tmp_path: Path) -> None:
    file = CheckedFolder(key="sglang.python", path=tmp_path / "python", use=FolderUse.present, expected=PRESENT)
    assert read_folder(file) is None
    file.path.touch()
    assert read_folder(file) == PRESENT


def test_ports_of_the_config_that_are_in_use_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = (
            FixedPort(key="gateway.port", port=each.getsockname()[1], host="127.0.0.1") for each in (server, other)
        )
        other.close()
        assert _NodeProbe().taken([taken, free]) == (taken,)
