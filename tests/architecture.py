"""The rules of the source tree, read from its syntax alone: nothing of it is imported.

`find_violations(folder)` returns one line for each breach. The rules are data at the top; the exceptions name a reason.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

PACKAGE = "rlscale"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("hosts",),
    ("teacher_scores",),
    ("images",),
    ("expert_routes",),
    ("types",),
    ("weight_types",),
    ("trajectory",),
    ("secrets",),
    ("tcp_keepalive",),
    ("architectures",),
    ("config",),
    ("plan",),
    ("protocols",),
    ("hook_protocols",),
    ("algo",),
    ("models",),
    ("plugins",),
    ("data", "rewards", "observe", "renderers", "sandboxes"),
    ("rollout", "engines", "services", "training", "weights", "checkpoint"),
    ("agents", "gateway"),
    ("examples",),
    ("evaluation", "worker"),
    ("control",),
    ("cluster",),
    ("driver",),
    ("crashtest", "launch", "doctor", "rehearsal", "migration"),
    ("__init__", "testing"),
    ("cli",),
)
"""Parts in import order: each may import earlier lines only, so those of one line do not know each other."""

OWNERS: dict[str, str] = {
    "ray": "cluster",
    "hydra": "config/hydra",
    "omegaconf": "config",
    "sglang": "engines",
    "setproctitle": "engines",  # of SGLang's environment
    "sglang_router": "engines",
    "megatron": "training",
}
"""Library -> the one folder or module, below the package, that may import it."""

BUNDLED: dict[str, str] = {"pydantic_core": "pydantic", "fla": "flash-linear-attention"}
"""Modules that only come with another distribution, which pins them exactly, or that need a GPU."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_MODULES: dict[str, int] = {"training": 14}
"""Folder -> the most modules directly in it, `__init__` not counted; further ones belong into a subfolder."""

SAME_CONTENTS = ("training/fsdp", "training/megatron")
"""Folders that must have the modules of `CONTENTS`, so that a reader of one finds everything in the other."""
_CONTENTS = "backend rank model step policy critic scorers policy_snapshots checkpoint export critic_backend"
CONTENTS = frozenset(_CONTENTS.split())
BANNED_NAMES = frozenset({"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"})

EXCEPTIONS: dict[str, str] = {
    "plugins/sample_view.py: append_response_tokens: parameters": "a method of slime's samples, which user code calls",
}
"""`file: function: limit` -> the reason for the exception. An unused exception is a breach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One parsed file."""

    path: str  # relative to the package, with slashes
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The folder or single file of the package that this belongs to."""
        return self.path.split("/")[0].removesuffix(".py")


def find_violations(
    folder: Path, *, exceptions: dict[str, str] = EXCEPTIONS, distributions: frozenset[str] | None = None
) -> list[str]:
    """Every breach in the package in `folder`.

    Args:
        distributions: names that may be imported from outside; None: do not check.
    """
    modules = [_parse(path, folder) for path in sorted(folder.rglob("*.py"))]
    found = [line for module in modules for line in _check(module)]
    found += _folders({module.path for module in modules})
    if distributions is not None:
        found += [line for module in modules for line in _undeclared(module, distributions)]
    excused = {line for line in found if _key(line) in exceptions}
    unused = exceptions.keys() - {_key(line) for line in excused}
    return [line for line in found if line not in excused] + [
        f"{key}: exception is not needed" for key in sorted(unused)
    ]


def declared_distributions(pyproject: Path) -> frozenset[str]:
    """Distributions that `pyproject.toml` names, extras included."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return frozenset(_normal(line) for line in lines)


def _check(module: Module) -> Iterator[str]:
    for rule in (_names, _docstring, _sizes, _direction, _owners, _swallowed, _prints, _hidden_imports):
        for what in rule(module):
            yield f"{module.path}: {what}"


def _key(line: str) -> str:
    """`a/b.py: name: rule (numbers)` without the numbers."""
    return line.split(" (")[0]


def _folders(paths: set[str]) -> Iterator[str]:
    """Breaches in the contents of whole folders."""
    for folder, limit in MAX_MODULES.items():
        inside = [path for path in paths if path.rpartition("/")[0] == folder and not path.endswith("/__init__.py")]
        if len(inside) > limit:
            yield f"{folder}: modules ({len(inside)}, at most {limit})"
    for folder in SAME_CONTENTS:
        parts = {path.removeprefix(f"{folder}/").split("/")[0] for path in paths if path.startswith(f"{folder}/")}
        if parts:
            for name in sorted(CONTENTS - {part.removesuffix(".py") for part in parts}):
                yield f"{folder}: has no {name}, which the other backends have"


def _names(module: Module) -> Iterator[str]:
    for name in module.path.removesuffix(".py").split("/"):
        if name in BANNED_NAMES:
            yield f"{name}: says nothing about what is in it"


def _docstring(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield "module: has no docstring"


def _sizes(module: Module) -> Iterator[str]:
    num_lines = module.text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"module: lines ({num_lines}, at most {MAX_FILE_LINES})"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function_sizes(node)


def _function_sizes(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > MAX_FUNCTION_LINES:
        yield f"{node.name}: lines ({num_lines}, at most {MAX_FUNCTION_LINES})"
    parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    num_parameters = len([name for name in parameters if name not in ("self", "cls")])
    if num_parameters > MAX_PARAMETERS:
        yield f"{node.name}: parameters ({num_parameters}, at most {MAX_PARAMETERS})"


def _direction(module: Module) -> Iterator[str]:
    rank = {part: i for i, layer in enumerate(LAYERS) for part in layer}
    if module.part not in rank:
        yield f"module: {module.part} has no place in the import order"
        return
    for name in _imports(module):
        if name.split(".")[0] != PACKAGE:
            continue
        target = name.split(".")[1] if "." in name else "__init__"
        if target == module.part:
            continue
        if rank.get(target, len(LAYERS)) >= rank[module.part]:
            yield f"{name}: imported against the order {module.part} <- {target}"


def _owners(module: Module) -> Iterator[str]:
    for name in _imports(module):
        owner = OWNERS.get(name.split(".")[0])
        if owner is not None and not f"{module.path.removesuffix('.py')}/".startswith(f"{owner}/"):
            yield f"{name}: imported outside of {owner}"


def _swallowed(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"line {node.lineno}: bare except"
            elif _is_broad(node.type) and all(_does_nothing(statement) for statement in node.body):
                yield f"line {node.lineno}: swallows every exception"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and _names_broad(node.args):
            yield f"line {node.lineno}: swallows every exception"


def _is_broad(node: ast.expr) -> bool:
    return _names_broad(node.elts if isinstance(node, ast.Tuple) else [node])


def _names_broad(kinds: Iterable[ast.expr]) -> bool:
    return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def _does_nothing(statement: ast.stmt) -> bool:
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass | ast.Continue)


def _prints(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno}: print; use the console, a sink or logging"


def _hidden_imports(module: Module) -> Iterator[str]:
    """An import inside of a function has its reason in a comment at it, or in a docstring that speaks of importing.

    Commands need none: they import late so that `--help` and a wrong config answer at once.
    """
    if module.part == "cli" or "import" in (ast.get_docstring(module.tree) or ""):
        return
    lines = module.text.splitlines()
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if "import" in (ast.get_docstring(function) or ""):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom) and not _has_comment(lines, node):
                yield f"{function.name}: imports inside a function without a reason (line {node.lineno})"


def _has_comment(lines: list[str], node: ast.Import | ast.ImportFrom) -> bool:
    """Whether an import has a comment, on its line or above its block of imports."""
    first = node.lineno - 1  # 0-based
    while lines[first - 1].lstrip().startswith(("import ", "from ")):
        first -= 1
    return any("#" in line for line in lines[first - 1 : node.end_lineno])


def _undeclared(module: Module, distributions: frozenset[str]) -> Iterator[str]:
    providers = _providers()
    for name in _imports(module):
        top = name.split(".")[0]
        if top == PACKAGE or top in sys.stdlib_module_names or top in OWNERS:
            continue
        if distributions.isdisjoint(
            {_normal(provider) for provider in providers.get(top, [top])} | {BUNDLED.get(top, top)}
        ):
            yield f"{module.path}: {top}: not a dependency in pyproject.toml"


@cache
def _providers() -> Mapping[str, list[str]]:
    return packages_distributions()


def _imports(module: Module) -> Iterator[str]:
    """Full dotted names of everything imported, wherever it stands."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            # `from rlscale import x` may import the part x.
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == PACKAGE else (base,)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folders = [PACKAGE, *module.path.split("/")[:-1]]
    kept: Iterable[str] = folders[: len(folders) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _parse(path: Path, folder: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    return Module(path=path.relative_to(folder).as_posix(), text=text, tree=ast.parse(text, filename=str(path)))


def _normal(requirement: str) -> str:
    """`PyYAML>=6.0` -> `pyyaml`."""
    name = requirement
    for mark in "[<>=!~; ":
        name = name.split(mark)[0]
    return name.lower().replace("_", "-")
