"""The paths in docs/architecture.md name functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^(\S+\.py) +([\w.]+)", re.MULTILINE)
LINES = LINE.findall((ROOT / "docs" / "architecture.md").read_text())


def test_the_page_lists_paths() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize(("file", "name"), LINES)
def test_a_named_function_exists(file: str, name: str) -> None:
    scope: ast.AST = ast.parse((ROOT / "src" / "rlscale" / file).read_text())
    for part in name.split("."):
        definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in ast.iter_child_nodes(scope) if isinstance(node, definitions) and node.name == part]
        assert found, f"{file} has no {name}"
        scope = found[0]
