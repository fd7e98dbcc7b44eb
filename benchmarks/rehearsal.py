"""Rehearses every recipe of conf/experiment and writes the table benchmarks/results/rehearsal.md.

    python benchmarks/rehearsal.py                   all recipes, one after the other; skips fresh rows
    python benchmarks/rehearsal.py qwen3_4b_grpo     these only, fresh or not; the rows of the others stay
    python benchmarks/rehearsal.py --fresh-h 0       all recipes; default: rows of the last 24 hours are fresh

Each recipe runs in a separate process: `rlscale-train experiment=<recipe> on=rehearsal`. A recipe that waits for a
later feature has the key it waits for instead of a verdict, and its uncut layout is checked without processes. A row is
written as soon as its recipe ends, so that a call that was interrupted resumes. A recipe that fails has a row with the
reason, which is never fresh, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
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
COLUMNS = ("recipe", "layout", "cut", "processes", "peak memory", "seconds", "date", "also not rehearsed", "verdict")
FAILED = "failed: "
NEVER = (
    "GPUs, NCCL, memory and speed",
    "the model and its tokenizer",
    "lengths and batch",
    "rewards that learning needs",
)
"""Parts that no rehearsal covers; the table names them once."""


def main() -> None:
    """Rehearses the recipes of the command line, or all whose rows are not fresh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--fresh-h", type=float, default=24.0)
    args = parser.parse_args()
    every = sorted(file.stem for file in (packaged_folder() / "experiment").glob("*.yaml"))
    file = RESULTS / "rehearsal.json"
    loads: list[float] = []
    found: dict[str, Any] = json.loads(file.read_text())["recipes"] if file.exists() else {}
    rows = {recipe: row for recipe, row in found.items() if recipe in every}
    for recipe in args.recipes or [each for each in every if not is_fresh(rows.get(each), args.fresh_h * 3600)]:
        loads.append(os.getloadavg()[0])
        rows[recipe] = {**try_rehearse(recipe), "at_s": time.time()}
        sys.stdout.write(f"{recipe}: {rows[recipe]}\n")
        sys.stdout.flush()
        rows = dict(sorted(rows.items()))
        file.write_text(json.dumps({"machine": machine(), "recipes": rows}, indent=2) + "\n")
        (RESULTS / "rehearsal.md").write_text(render(sentence(loads), rows))
    missing = [recipe for recipe in every if recipe not in rows]
    failed = [recipe for recipe, row in rows.items() if row["verdict"].startswith(FAILED)]
    sys.stdout.write(f"{len(rows)} of {len(every)} recipes; failed: {failed or 'none'}; missing: {missing or 'none'}\n")
    sys.exit(1 if failed or missing else 0)


def is_fresh(row: dict[str, Any] | None, max_age_s: float) -> bool:
    """Whether a row need not be measured again: it is of the last `max_age_s`, and the recipe did not fail."""
    return row is not None and not row["verdict"].startswith(FAILED) and time.time() - row.get("at_s", 0) < max_age_s


def try_rehearse(recipe: str) -> dict[str, Any]:
    """The row of a recipe, also of one that cannot be loaded: it must not hide the others."""
    try:
        return rehearse(recipe)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return {"layout": "-", "cut": [], "processes": "-", "peak_bytes": None, "seconds": None} | {
            "verdict": f"{FAILED}{reason[:300]}"
        }


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
        "not_rehearsed": [],
    }
    waits = waits_for(recipe)
    if waits:
        faults = check_layout(config, policy_architecture(config.model)).faults
        return row | {"verdict": f"waits for {', '.join(waits)}", "faults": list(faults)}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-m", "rlscale.cli.train", f"experiment={recipe}", "on=rehearsal"]
        try:
            done = subprocess.run(
                [*command, f"run.dir={folder}"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return row | {"seconds": TIMEOUT_S, "verdict": f"{FAILED}did not end within {TIMEOUT_S} s"}
        row["seconds"] = round(time.monotonic() - began)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return row | {"verdict": f"{FAILED}exit code {done.returncode}: {last}"}
        report = json.loads((Path(folder) / "rehearsal.json").read_text())
    replaced = [[part, instead] for part, instead in report["not_rehearsed"] if part not in NEVER]
    found = {"peak_bytes": report["peak_bytes"], "not_rehearsed": replaced}
    return row | found | {"verdict": "trained two rollouts"}


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
        "Peak memory: the sum of the anonymous memory of all processes. Versions and load are those of the last call,",
        "which may have rehearsed only some of the rows.",
        "",
        f"Not rehearsed in any row: {'; '.join(NEVER)}.",
        "The column has the other parts of the recipe that something else replaced, as `part: what ran instead`;",
        "`rehearsal.md` in the run folder has all of them.",
        "",
        where,
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for recipe, row in rows.items():
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f} GB"
        verdict = "; ".join([row["verdict"], *row.get("faults", [])])
        day = datetime.date.fromtimestamp(row["at_s"]) if "at_s" in row else "-"
        cut = "; ".join(row["cut"]) or "none"
        others = "; ".join(f"{part}: {instead}" for part, instead in row.get("not_rehearsed", [])) or "-"
        cells = (recipe, row["layout"], cut, row["processes"], peak, row["seconds"] or "-", day, others)
        lines.append(f"| {' | '.join(map(str, cells))} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
