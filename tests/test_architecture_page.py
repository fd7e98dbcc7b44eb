"""The paths in docs/architecture.md name functions that exist, and each line calls the next one."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rlscale"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_FRAMES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a path."""

    file: str
    name: str  # of a function, after its class
    note: str
    block: int

    @property
    def called(self) -> str:
        """The name by which other code calls the function: of `A.__init__` that of the class."""
        first, _, last = self.name.rpartition(".")
        return first if last == "__init__" else last


def read_lines() -> Iterator[Line]:
    for block, text in enumerate(re.split(r"```|\n\n", PAGE)):
        for file, name, note in re.findall(r"^(\S+\.py) +([\w.]+) *(.*)$", text, re.MULTILINE):
            yield Line(file=file, name=name, note=note, block=block)


LINES = list(read_lines())


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text())


@cache
def used_names(file: str) -> frozenset[str]:
    """Names, attributes and words in quotes that a module uses; private ones without their underscore."""
    names = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(f"{node.value!r}")
    return frozenset(name.lstrip("_") for name in names)


def file_of(name: str) -> str:
    """The module of a function that the page has a line for."""
    files = [line.file for line in LINES if line.name == name]
    assert files, f"the page has no line for {name}"
    return files[0]


def use_of(before: Line | None, line: Line) -> tuple[str, str] | None:
    """A module and the name by which it calls the function of a line; None: the line begins a path."""
    if found := re.search(r"argument `(\w+)` of ([\w.]+)", line.note):
        return file_of(found[2]), found[1]
    if found := re.search(r"named by ([\w.]+)", line.note):
        return file_of(found[1]), f"{line.called!r}"
    if found := re.search(r"called by ([\w.]+)", line.note):
        return file_of(found[1]), line.called
    return None if before is None else (before.file, line.called)


def read_uses() -> Iterator[tuple[str, str]]:
    for before, line in pairwise(LINES):
        use = use_of(before if before.block == line.block else None, line)
        if use is not None:
            yield use


USES = list(read_uses())


def test_the_page_lists_paths() -> None:
    assert len(LINES) > 50
    assert len(USES) > len(LINES) - 8


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_named_function_exists(line: Line) -> None:
    scope: ast.AST = tree_of(line.file)
    for part in line.name.split("."):
        definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in ast.iter_child_nodes(scope) if isinstance(node, definitions) and node.name == part]
        assert found, f"{line.file} has no {line.name}"
        scope = found[0]


@pytest.mark.parametrize(("file", "name"), USES)
def test_a_named_function_is_called_where_the_page_says(file: str, name: str) -> None:
    assert name.lstrip("_") in used_names(file)


def test_few_frames_lie_between_the_command_and_the_loop() -> None:
    first = [line for line in LINES if line.block == LINES[0].block]
    assert (first[0].name, first[-1].name) == ("main", "TrainingLoop.run")
    assert len(first) <= MAX_FRAMES


@pytest.mark.parametrize("block", sorted({line.block for line in LINES}))
def test_a_path_that_returns_to_an_earlier_file_has_a_reason(block: int) -> None:
    lines = [line for line in LINES if line.block == block]
    for number, line in enumerate(lines):
        earlier = {each.file for each in lines[:number]} - {lines[number - 1].file}
        assert line.file not in earlier or line.note, f"{line.file} is in the path again, without a reason"
