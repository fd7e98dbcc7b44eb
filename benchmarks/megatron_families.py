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
from typing import Any

from machine import machine, sentence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from tests.ranks.training.launch import report, run_ranks  # noqa: E402  # the comparison is that of the tests
from tests.ranks.training.megatron_families import NEWER, write_families  # noqa: E402
from tests.ranks.training.megatron_family_ranks import CASES, LAYOUTS  # noqa: E402

BRIDGE = "`model.megatron_to_hf_mode=bridge` is refused for all of them: mbridge does not convert them."


def compare(families: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of families: `family` -> `layout` -> differences, and whether both conversions return the same bytes."""
    names = [name for name, (family, _) in CASES.items() if family in families]
    with TemporaryDirectory() as folder:
        models, reports = Path(folder) / "models", Path(folder) / "reports"
        reports.mkdir()
        write_families(models, {family: NEWER[family] for family in families})
        run_ranks("tests.ranks.training.megatron_family_ranks", str(models), str(reports), *names, timeout_s=3000)
        found = [report(reports, rank) for rank in range(2)]
    rows: dict[str, dict[str, Any]] = {}
    for family in families:
        own = {layout: name for name, (each, layout) in CASES.items() if each == family}
        rows[family] = {
            layout: {key: max(rank[name][key] for rank in found) for key in ("logprobs", "grads")}
            | {"exported": all(rank[name]["exported"] for rank in found)}
            for layout, name in own.items()
        }
        rows[family]["converted"] = all(rank[family] for rank in found)
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Logprobs / gradients of each layout; the last column is for conversion and export."""
    lines = [f"| model | {' | '.join(LAYOUTS)} | bytes of conversion and export |", "|---" * (2 + len(LAYOUTS)) + "|"]
    for family, row in rows.items():
        cells = [f"{row[x]['logprobs']:.0e} / {row[x]['grads']:.0e}" if x in row else "-" for x in LAYOUTS]
        same = row["converted"] and all(row[x]["exported"] for x in LAYOUTS if x in row)
        lines.append(f"| `{family}` | {' | '.join(cells)} | {'equal' if same else 'differ'} |")
    return "\n".join(lines)


def write(rows: Mapping[str, Mapping[str, Any]], load: float) -> None:
    content = {"machine": machine(), "load": load, "families": rows}
    (RESULTS / "megatron_families.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "megatron_families.md").write_text(
        "# Families of Megatron-core compared with transformers\n\n"
        f"{sentence([load])} Made by `python benchmarks/megatron_families.py`.\n\n"
        "Two ranks in float32. Largest difference of the logprobs / of the gradients, relative to the largest entry of "
        "a tensor. A conversion writes Megatron-core's format with two tensor-parallel ranks, reads it in another "
        "layout and returns the files of the start. A dash: the model has no experts, or experts with biases. "
        f"{BRIDGE}\n\n"
        f"{table(rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", choices=list(NEWER), default=list(NEWER))
    families, load = parser.parse_args().families, os.getloadavg()[0]
    file = RESULTS / "megatron_families.json"
    known = json.loads(file.read_text())["families"] if file.exists() else {}
    rows = known | compare(families)
    write({family: rows[family] for family in NEWER if family in rows}, load)


if __name__ == "__main__":
    main()
