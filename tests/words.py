"""Checks the rule of words (CONTRIBUTING.md) as far as a program can: reads text and syntax of files, imports nothing.

`find_names(folder)` checks a package: identifiers, first words of docstrings, unique class names and module basenames.
`find_phrases(files)` checks any text, prose included.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

FIRST_WORDS = frozenset({"what", "which", "where", "when", "who", "whom", "whose", "how", "of"})
"""A docstring starts with a noun or a verb in the third person, never with one of these."""

_NAMES = """
tell tells told meet meets come comes rest resting story witness witnessed guardian knock anew beside nobody everyone
everywhere asked settle carry carries put team room fate fates
"""
BANNED_IN_NAMES = frozenset(_NAMES.split())
"""Words that an identifier defined here must not contain: the field has a plainer one for each."""

BANNED_PHRASES = re.compile(
    r"\b(told|tells|anew|nobody|meanwhile|goes on|go on|going on|went on|beside|besides|takes? turns|deserves? a word"
    r"|witnessed|(?:of|on|for) (?:its|their) own|look(?:s|ed)? at|(?:hands?|handed) (?:out|over)|had better"
    r"|(?:leav(?:e|es|ing)|left)(?: (?:it|them))? out|each of (?:which|whom))\b",
    re.IGNORECASE,
)
"""Phrases with a plainer form: report, again, no one, continue, next to, share, separate, inspect, pass, omit.

`say` is not among them: a text, a rule or an option says something, while a program prints or reports it.
"""

SHARED_BASENAMES = frozenset(
    {"__init__", "backend", "policy", "critic", "rank", "checkpoint", "config", "model", "step"}
)
"""Basenames that several packages may use, because each has the same role there."""

MIRRORED = frozenset({"groups", "rules", "fsdp", "megatron", "cli", "families"})
"""Folders whose modules mirror others by design, so that their basenames need not be unique."""

EXCEPTIONS: dict[str, str] = {
    "config/groups/logging.py: team": "the config key `logging.wandb.team` of arguments.csv, which wandb calls entity",
}
"""`path: name` -> the reason why this name stays, e.g. because a library or arguments.csv defines it."""

MIN_COMMENTS, MAX_COMMENTS = 2.0, 4.0
"""Comment lines for each 100 lines of code over the whole package."""


def find_names(folder: Path, *, exceptions: dict[str, str] = EXCEPTIONS) -> list[str]:
    """Every breach in the names of the package in `folder`, one line each."""
    trees = {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    found = [f"{path}: {text}" for path, tree in trees.items() for text in (*_docstrings(tree), *_identifiers(tree))]
    found += [*_same_classes(trees), *_same_basenames(trees)]
    excused = {line for line in found if _key(line) in exceptions}
    unused = exceptions.keys() - {_key(line) for line in excused}
    return [line for line in found if line not in excused] + [
        f"{key}: exception is not needed" for key in sorted(unused)
    ]


def find_phrases(files: Iterable[Path]) -> list[str]:
    """`file:line: phrase` for each banned phrase."""
    return [
        f"{path}:{number}: {match[0]}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in BANNED_PHRASES.finditer(line)
    ]


def comment_density(folder: Path) -> float:
    """Whole-line comments for each 100 non-empty lines that are no comment."""
    num_comments = num_code = 0
    for path in folder.rglob("*.py"):
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        own = sum(1 for token in tokens if token.type == tokenize.COMMENT and token.line.strip().startswith("#"))
        num_comments += own
        num_code += sum(1 for line in text.splitlines() if line.strip()) - own
    return 100 * num_comments / num_code


def _key(line: str) -> str:
    """`path: name` without what follows in brackets."""
    return line.split(" (")[0]


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, _Documented):
            continue
        texts = {getattr(node, "name", "module"): ast.get_docstring(node) or "", **dict(_field_docstrings(node))}
        for name, text in texts.items():
            first = re.match(r"\W*(\w+)", text)
            if first and first[1].lower() in FIRST_WORDS:
                yield f"{name} (docstring starts with {first[1]!r})"


def _field_docstrings(node: _Documented) -> Iterator[tuple[str, str]]:
    """Fields and constants, each with the string below it."""
    for before, after in pairwise(node.body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(before, ast.Assign | ast.AnnAssign) and is_text and isinstance(after.value.value, str):
            target = before.targets[0] if isinstance(before, ast.Assign) else before.target
            yield ast.unparse(target), after.value.value


def _identifiers(tree: ast.Module) -> Iterator[str]:
    for name in dict.fromkeys(_defined(tree)):
        if banned := sorted(_parts(name) & BANNED_IN_NAMES):
            yield f"{name} (name contains {', '.join(banned)})"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of classes, functions, parameters, variables and fields that the module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _parts(name: str) -> set[str]:
    """`lookAt_put` -> {look, at, put}."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def _same_classes(trees: dict[str, ast.Module]) -> Iterator[str]:
    where = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(path)
    for name, paths in where.items():
        if len(paths) > 1:
            yield f"{paths[0]}: {name} (class name is also in {', '.join(paths[1:])})"


def _same_basenames(trees: dict[str, ast.Module]) -> Iterator[str]:
    where = defaultdict(list)
    for path in trees:
        *folders, file = path.split("/")
        if MIRRORED.isdisjoint(folders):
            where[file.removesuffix(".py")].append(path)
    for name, paths in where.items():
        if len(paths) > 1 and name not in SHARED_BASENAMES:
            yield f"{paths[0]}: {name} (module basename is also in {', '.join(paths[1:])})"
