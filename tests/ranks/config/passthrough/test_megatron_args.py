"""Group `megatron`: another installed version is queried in a process."""

import sys
from pathlib import Path

import pytest

from rlscale.config.passthrough import check_passthrough

MODULE = """
from dataclasses import dataclass
from typing import Callable
@dataclass
class MLATransformerConfig:
    num_layers: int = 0
    brand_new: bool = False
    hook: Callable | None = None
"""


def test_another_installed_version_is_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "megatron" / "core"
    for folder in (package.parent, package, package / "transformer"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (package / "transformer" / "transformer_config.py").write_text(MODULE)
    (package / "optimizer.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass OptimizerConfig:\n  a: int\n"
    )
    info = tmp_path / "megatron_core-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # The query runs in a separate process, which does not inherit the path of this one.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    passed = check_passthrough({"megatron.brand_new": True, "megatron.bf17": 1}, {}, lambda path: "")
    assert passed.values == {"megatron": {"brand_new": True}}
    assert "Megatron-core 0.99.0's" in str(passed.problems[0])
