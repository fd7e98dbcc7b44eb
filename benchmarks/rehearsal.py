"""Rehearses every recipe of conf/experiment and writes the table benchmarks/results/rehearsal.md.

    python benchmarks/rehearsal.py                   all recipes, one after the other
    python benchmarks/rehearsal.py qwen3_4b_grpo     these only; the rows of the others stay

Each recipe runs in a separate process: `rlscale-train experiment=<recipe> on=rehearsal`. A recipe that waits for a
later feature has the key it waits for instead of a verdict, and its uncut layout is checked without processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine, sentence

from rlscale.config import load_config_with_notes
from rlscale.config.hydra.config_folders import packaged_folder
from rlscale.errors import ConfigError
from rlscale.plan.model_size import policy_architecture
from rlscale.rehearsal.coverage import describe_layout
from rlscale.rehearsal.cut_layout import cut_layout, list_cuts, read_sizes
from rlscale.rehearsal.layout_check import check_layout

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 1800
COLUMNS = ("recipe", "layout", "cut", "processes", "peak memory", "seconds", "verdict")


def main() -> None:
    """Rehearses the recipes of the command line, or all."""
    recipes = sys.argv[1:] or sorted(file.stem for file in (packaged_folder() / "experiment").glob("*.yaml"))
    file = RESULTS / "rehearsal.json"
    loads: list[float] = []
    rows: dict[str, Any] = json.loads(file.read_text())["recipes"] if file.exists() else {}
    for recipe in recipes:
        rows[recipe] = rehearse(recipe)
        sys.stdout.write(f"{recipe}: {rows[recipe]}\n")
        sys.stdout.flush()
        rows = dict(sorted(rows.items()))
        loads.append(os.getloadavg()[0])
        file.write_text(json.dumps({"machine": machine(), "recipes": rows}, indent=2) + "\n")
        (RESULTS / "rehearsal.md").write_text(render(sentence(loads), rows))


def rehearse(recipe: str) -> dict[str, Any]:
    """One row of the table."""
    config = load_config_with_notes([f"experiment={recipe}"], to_run=False).config
    sizes = read_sizes(config)
    cut = cut_layout(sizes)
    row: dict[str, Any] = {
        "layout": describe_layout(config, sizes),
        "cut": [f"{name} {old} -> {new}" for name, old, new in list_cuts(sizes, cut)],
        "processes": cut.processes,
        "peak_bytes": None,
        "seconds": None,
    }
    waits = waits_for(recipe)
    if waits:
        faults = check_layout(config, policy_architecture(config.model)).faults
        return row | {"verdict": f"waits for {', '.join(waits)}", "faults": list(faults)}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-m", "rlscale.cli.train", f"experiment={recipe}", "on=rehearsal"]
        done = subprocess.run(
            [*command, f"run.dir={folder}"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        row["seconds"] = round(time.monotonic() - began)
        if done.returncode:
            return row | {"verdict": f"failed: {done.stderr.strip().splitlines()[-1]}"}
        report = json.loads((Path(folder) / "rehearsal.json").read_text())
    return row | {"peak_bytes": report["peak_bytes"], "verdict": "trained two rollouts"}


def waits_for(recipe: str) -> list[str]:
    """Keys of a recipe that this version does not support yet."""
    try:
        load_config_with_notes([f"experiment={recipe}", "on=rehearsal"])
    except ConfigError as error:
        return sorted({problem.path for problem in error.problems})
    return []


def render(where: str, rows: dict[str, Any]) -> str:
    """The table as Markdown.

    Args:
        where: machine and versions.
    """
    lines = [
        "# Rehearsal of every recipe",
        "",
        "`python benchmarks/rehearsal.py` runs `rlscale-train experiment=<recipe> on=rehearsal` for each recipe.",
        "Peak memory is the sum of the anonymous memory of all processes. Date and load are those of the last call,",
        "which may have rehearsed only some of the rows.",
        "",
        where,
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for recipe, row in rows.items():
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f} GB"
        verdict = "; ".join([row["verdict"], *row.get("faults", [])])
        cells = (recipe, row["layout"], "; ".join(row["cut"]) or "none", row["processes"], peak, row["seconds"] or "-")
        lines.append(f"| {' | '.join(map(str, cells))} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
