"""Model families of Megatron-core compared with transformers: every parallel layout of two ranks, and the conversion.

Tiny models with random weights in float32. A row has the largest difference of the logprobs, that of the gradients
relative to the largest entry of a tensor, and whether exported weights equal the loaded ones byte for byte.
Writes `results/megatron_families.md` and `.json`; rows of families that a call does not compute are kept.

    python benchmarks/megatron_families.py [--families moonlight mimo ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from machine import machine, sentence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from tests.ranks.training import megatron_delta_ranks, megatron_family_ranks  # noqa: E402
from tests.ranks.training.launch import report, run_ranks  # noqa: E402  # the comparison is that of the tests
from tests.ranks.training.megatron_families import DELTAS, NEWER, write_families  # noqa: E402

GROUPS: tuple[tuple[Mapping[str, Any], ModuleType], ...] = (
    (NEWER, megatron_family_ranks),
    (DELTAS, megatron_delta_ranks),
)
"""Families with the program of their ranks; those with linear attention have other layouts."""


def compare(families: list[str], known: Mapping[str, Any], ranks: ModuleType) -> dict[str, dict[str, Any]]:
    """The rows of families: `family` -> `layout` -> differences, and whether both conversions return the same bytes.

    Args:
        families: of one group.
        known: the models of the group.
        ranks: the program of its ranks.
    """
    names = [name for name, (family, _) in ranks.CASES.items() if family in families]
    with TemporaryDirectory() as folder:
        models, reports = Path(folder) / "models", Path(folder) / "reports"
        reports.mkdir()
        write_families(models, {family: known[family] for family in families})
        run_ranks(ranks.__name__, str(models), str(reports), *names, timeout_s=3000)
        found = [report(reports, rank) for rank in range(2)]
    rows: dict[str, dict[str, Any]] = {}
    for family in families:
        own = {layout: name for name, (each, layout) in ranks.CASES.items() if each == family}
        rows[family] = {
            layout: {key: max(rank[name][key] for rank in found) for key in ("logprobs", "grads")}
            | {key: all(rank[name][key] for rank in found) for key in ("exported", "bridged") if key in found[0][name]}
            for layout, name in own.items()
        }
        rows[family]["converted"] = all(rank[family] for rank in found)
    return rows


def table(rows: Mapping[str, Mapping[str, Any]], layouts: list[str]) -> str:
    """Logprobs / gradients of each layout; the last columns are for conversion and export, and for mbridge."""
    names = ["model", *layouts, "bytes of conversion and export", "by mbridge"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for family, row in rows.items():
        cells = [f"{row[x]['logprobs']:.0e} / {row[x]['grads']:.0e}" if x in row else "-" for x in layouts]
        compared = [row[x] for x in layouts if x in row]
        same = row["converted"] and all(each["exported"] for each in compared)
        bridged = [each["bridged"] for each in compared if "bridged" in each]
        words = ["equal" if same else "differ", ("equal" if all(bridged) else "differ") if bridged else "refused"]
        lines.append(f"| `{family}` | {' | '.join([*cells, *words])} |")
    return "\n".join(lines)


def write(rows: Mapping[str, Mapping[str, Any]], load: float) -> None:
    content = {"machine": machine(), "load": load, "families": rows}
    tables = []
    for known, ranks in GROUPS:
        own = {family: rows[family] for family in known if family in rows}
        tables.append(table(own, [layout for layout in ranks.LAYOUTS if any(layout in row for row in own.values())]))
    (RESULTS / "megatron_families.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "megatron_families.md").write_text(
        "# Families of Megatron-core compared with transformers\n\n"
        f"{sentence([load])} Made by `python benchmarks/megatron_families.py`.\n\n"
        "Two ranks in float32. Largest difference of the logprobs / of the gradients, relative to the largest entry of "
        "a tensor. A conversion writes Megatron-core's format with two tensor-parallel ranks, reads it in another "
        "layout and returns the files of the start. A dash: the model has no experts, or experts with biases, or the "
        "layout was not compared. By mbridge (`model.megatron_to_hf_mode=bridge`): it loads the same parameters as "
        "rlscale's tables and exports the bytes of the folder, in every layout of the row.\n\n"
        + "\n\n".join(tables)
        + "\n\nModels with linear attention are in the second table; sp: sequence "
        "parallelism, etp2: experts divided by tensors, rows: padded rows instead of packed samples.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", choices=[*NEWER, *DELTAS], default=[*NEWER, *DELTAS])
    families, load = parser.parse_args().families, os.getloadavg()[0]
    file = RESULTS / "megatron_families.json"
    known = json.loads(file.read_text())["families"] if file.exists() else {}
    rows = dict(known)
    for models, ranks in GROUPS:
        chosen = [family for family in families if family in models]
        rows |= compare(chosen, models, ranks) if chosen else {}
    write({family: rows[family] for family in (*NEWER, *DELTAS) if family in rows}, load)


if __name__ == "__main__":
    main()
