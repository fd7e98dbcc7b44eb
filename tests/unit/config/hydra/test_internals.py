"""One file uses internals of Hydra and OmegaConf, and it was written for the installed versions."""

import ast
import tomllib
from importlib.metadata import version
from pathlib import Path

from rlscale.config.hydra import internals

ROOT = Path(__file__).parents[4]
INTERNAL = ("hydra._internal", "omegaconf._utils")


def test_the_versions_are_those_of_the_file() -> None:
    assert (version("hydra-core"), version("omegaconf")) == (internals.HYDRA, internals.OMEGACONF)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"hydra-core=={internals.HYDRA}" in project["dependencies"]


def test_no_other_file_uses_internals() -> None:
    using = set()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        # An import contains the name; parsing every file takes seconds.
        if not any(name in text for name in INTERNAL):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith(INTERNAL) for name in names):
                using.add(file.name)
    assert using == {"internals.py"}
