"""Paths and ports that every node of a run needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.driver import node_check
from rlscale.driver.node_check import checked_folders, fixed_ports
from rlscale.plan.node_facts import FixedPort, FolderUse
from tests.unit.config.rules.valid_config import SGLANG, config_with


def folders_of(tmp_path: Path, values: dict[str, Any]) -> dict[str, tuple[Path, FolderUse]]:
    prepared: Any = SimpleNamespace(config=config_with(values), model_path=str(tmp_path / "model"))
    found = checked_folders(prepared, run_folder=tmp_path / "run")
    return {folder.key: (folder.path, folder.use) for folder in found}


def test_exports_and_paths_of_sglang_are_compared(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    arguments = {"chat_template": str(tmp_path / "template.jinja"), "served_model_name": "policy"}
    values = {
        **SGLANG,
        "sglang.python": "/opt/sglang/bin/python",
        "sglang.server_args": arguments,
        "checkpoint.save_hf": "/exports/step_{rollout_id}/hf",
    }
    found = folders_of(tmp_path, values)
    assert found.keys() == {"run.dir", "checkpoint.save_hf", "sglang.python", "sglang.chat_template"}
    assert found["checkpoint.save_hf"] == (Path("/exports"), FolderUse.shared)
    assert found["sglang.chat_template"] == (tmp_path / "template.jinja", FolderUse.same)
    assert found["sglang.python"] == (Path("/opt/sglang/bin/python"), FolderUse.present)
    assert folders_of(tmp_path, {"sglang.python": "/opt/sglang/bin/python"}).keys() == {"run.dir"}


def test_ports_are_those_of_the_gateway_and_of_engines_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "driver_node", lambda: "head")
    bundles: Any = SimpleNamespace(engine_nodes=frozenset({"other"}))
    values = {"gateway.enabled": True, "gateway.port": 31999, "sglang.server_args": {"grpc_port": 50051, "tp_size": 1}}
    config = config_with({**SGLANG, **values})
    assert fixed_ports(config, bundles, "head") == (FixedPort(key="gateway.port", port=31999),)
    assert fixed_ports(config, bundles, "other") == (FixedPort(key="sglang.grpc_port", port=50051),)
    assert fixed_ports(config, bundles, "third") == ()
    assert fixed_ports(config_with({"gateway.port": 31999}), bundles, "head") == ()
