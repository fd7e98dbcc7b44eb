"""Records which names of torch and transformers exist in the versions of a machine for GPUs.

    python -m pip download --no-deps torch==2.11.0 transformers==5.17.0 -d wheels
    python -m scripts.record_library_names wheels/*.whl

Writes tests/data/library_names.json: for each wheel the names that rlscale uses and the wheel's sources define, with
the parameters of functions in Python. tests/unit/test_library_names.py compares the source tree with it. The wheels are
only read, never installed or imported, so that those for another system serve as well.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from tests.library_names import find_used

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "data" / "library_names.json"
# torch defines part of its names in C++; these stubs list them.
STUBS = {"torch": ("torch._C", "torch._C._VariableFunctions")}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.stmt


class Wheel:
    """The Python sources and stubs in a wheel."""

    def __init__(self, path: Path) -> None:
        self.package, self.version = path.name.split("-")[:2]
        self._files = zipfile.ZipFile(path)
        self._trees: dict[str, ast.Module] = {}
        self._visited: set[tuple[str, str]] = set()

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._files.namelist())

    def parameters(self, dotted: str) -> list[str] | bool:
        """Parameters of a Python function with fixed ones; True for any other name that exists, else False."""
        parts = dotted.split(".")
        for i in range(len(parts), 0, -1):
            module = ".".join(parts[:i])
            if self._file(module) is not None:
                self._visited.clear()
                return self._find(module, parts[i:])
        return False

    def _find(self, module: str, names: Sequence[str]) -> list[str] | bool:
        """The rest of a name in a module; follows imports, each once."""
        if not names:
            return True
        if (module, names[0]) in self._visited or self._file(module) is None:
            return False
        self._visited.add((module, names[0]))
        if self._file(f"{module}.{names[0]}") is not None:
            return self._find(f"{module}.{names[0]}", names[1:])
        for found in self._definitions(module, names[0]):
            if isinstance(found, ast.FunctionDef):
                return _parameters(found)
            if not isinstance(found, tuple):
                # An attribute of a class or of a value; what it inherits is not searched.
                return True
            result = self._find(found[0], [*found[1:], *names[1:]])
            if result is not False:
                return result
        for stub in STUBS.get(module, ()):
            if (result := self._find(stub, names)) is not False:
                return result
        # Lazy modules list their names as text, and a module may be replaced by an object with properties.
        name = re.escape(names[0])
        return bool(re.search(rf"[\"']{name}[\"']|^ +def {name}\(", self._text(module), re.MULTILINE))

    def _definitions(self, module: str, name: str) -> Iterator[Definition | tuple[str, ...]]:
        """The definition of a name in a module: a statement, or the module it is imported from."""
        for node in _statements(self._tree(module).body):
            if name in _bound(node):
                yield node
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        yield base, alias.name
                    elif alias.name == "*":
                        yield base, name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.split(".")[0]) == name:
                        yield (alias.name,) if alias.asname else (alias.name.split(".")[0],)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self._file(module) or "").rpartition("/")[2].startswith("__init__.")
        folders = module.split(".") if is_package else module.split(".")[:-1]
        kept = folders[: len(folders) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        names = (f"{path}/__init__.py", f"{path}.py", f"{path}/__init__.pyi", f"{path}.pyi")
        return next((name for name in names if name in self._names), None)

    def _text(self, module: str) -> str:
        file = self._file(module)
        return self._files.read(file).decode() if file else ""

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self._text(module))
        return self._trees[module]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a module, also inside of if, try and with."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a definition or an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple | ast.List) else (t,))]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _parameters(node: ast.FunctionDef) -> list[str] | bool:
    """Names that may be keywords; True where any may, or where a decorator may change them."""
    a = node.args
    is_plain = a.kwarg is None and not node.decorator_list
    return [each.arg for each in (*a.args, *a.kwonlyargs)] if is_plain else True


def main(paths: Sequence[str]) -> int:
    """Records the names. Returns 1, and prints them, where a wheel lacks some."""
    record, missing = {}, []
    for wheel in map(Wheel, map(Path, paths)):
        used = find_used(ROOT / "src" / "rlscale", (wheel.package,))
        found = {name: wheel.parameters(name) for name in sorted(used)}
        record[f"{wheel.package} {wheel.version.split('+')[0]}"] = {n: p for n, p in found.items() if p is not False}
        missing += [f"{wheel.package} {wheel.version}: no {name}" for name, p in found.items() if p is False]
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join([*missing, f"{RECORD}: {', '.join(record)}"]) + "\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
