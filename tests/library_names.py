"""Names of libraries that the source tree uses, read from its syntax alone: nothing of it is imported.

`find_used(folder, roots)` returns each dotted name, and the keywords of its calls.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

DYNAMIC = ("torch.ops.",)
"""Names below these are made at run time by operators that a library registers; no source defines them."""


def find_used(folder: Path, roots: tuple[str, ...]) -> dict[str, set[str]]:
    """Every dotted name of `roots` in the package in `folder`, with the keywords of direct calls to it."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        aliases = dict(_aliases(tree, roots))
        for name in aliases.values():
            used[name] |= set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)):
                used[name] |= set()
            elif isinstance(node, ast.Call) and (name := _dotted(node.func, aliases)):
                used[name] |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    return {name: keywords for name, keywords in used.items() if not name.startswith(DYNAMIC)}


def _aliases(tree: ast.Module, roots: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Local name -> full dotted name of everything imported from `roots`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in roots:
                    # `import a.b` binds a, `import a.b as c` binds a.b.
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in roots:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str | None:
    """The full name of `alias.a.b`; None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])
