"""Translates every launch script of a checkout and prints a table: `python scripts/migrate_checkout.py <folder> ...`.

A script without a value for a variable is translated a second time with a placeholder. Columns: inputs that start a
run, translated, written without losses, loads, can be planned, has a key that waits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.config import RunConfig
from rlscale.errors import ConfigError
from rlscale.migration.findings import Kind
from rlscale.migration.migrate import load_experiment, translate_input
from rlscale.migration.migration_report import Migration
from rlscale.plan import find_hardware, make_plan

SUFFIXES = (".sh", ".py")
NEEDED = "has no default"
_NUMBERS = ("NUM", "SIZE", "NODES", "GPUS", "COUNT", "RANK")


@dataclass(kw_only=True)
class Result:
    """Counts of one folder."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    scripts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by path in the folder


def translate_all(folder: Path) -> Result:
    """Translates the scripts of a folder.

    Raises every error except those of an input that starts no run.
    """
    result = Result()
    for path in find_inputs(folder):
        try:
            found = _translate(path)
        except ConfigError:
            continue
        config, problems = _load(found)
        row = {
            "arguments": len(found.arguments),
            "complete": not found.losses,
            "loads": config is not None,
            "plans": config is not None and _plans(config),
            "refused": any(place.kind is Kind.refused for place in found.places.values()),
        }
        result.counts.update({"inputs": 1, **row})
        result.kinds.update(str(place.kind) for place in found.places.values())
        result.problems.update(problems)
        lost = [finding.line(found.root) for finding in found.losses]
        result.scripts[str(path.relative_to(folder))] = {**row, "losses": lost, "problems": problems}
    return result


def find_inputs(folder: Path) -> Iterator[Path]:
    """Scripts and launchers, without files of models, which only have arguments of an architecture."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SUFFIXES or "models" in path.parts or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".sh" or "train_args" in text or "GRPOConfig(" in text:
            yield path


def _translate(path: Path) -> Migration:
    found = translate_input(path)
    needed = [note.subject for note in found.notes if note.kind is Kind.variable and NEEDED in note.text]
    if not needed:
        return found
    given = {
        name: "8" if any(word in name.upper() for word in _NUMBERS) else f"/data/{name.lower()}" for name in needed
    }
    return translate_input(path, set=given)


def _load(found: Migration) -> tuple[RunConfig | None, list[str]]:
    """The config of an experiment on GPUs, or the rules that it breaks."""
    try:
        return load_experiment(found.yaml, found.name, ["cluster.device=cuda"]).config, []
    except ConfigError as error:
        return None, [f"{problem.path} must {problem.rule}" for problem in error.problems]


def _plans(config: RunConfig) -> bool:
    try:
        make_plan(config, find_hardware("h100"))
    except ConfigError:
        return False  # the architecture is only in a checkpoint that is not here
    return True


def main(folders: Sequence[str]) -> int:
    """Prints a row for each folder, and what keeps experiments from loading."""
    columns = ("inputs", "arguments", "complete", "loads", "plans", "refused")
    rows = [("folder", *columns)]
    for folder in folders:
        result = translate_all(Path(folder))
        rows.append((Path(folder).name, *(str(result.counts[column]) for column in columns)))
        kinds = ", ".join(f"{kind} {number}" for kind, number in result.kinds.most_common())
        sys.stdout.write(f"{folder}: {kinds}\n")
        for problem, number in result.problems.most_common(12):
            sys.stdout.write(f"  {number} {problem}\n")
    for row in rows:
        sys.stdout.write("| " + " | ".join(row) + " |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
