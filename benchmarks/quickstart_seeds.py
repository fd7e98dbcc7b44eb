"""Checks that the quickstart learns with every seed, and only because of GRPO.

Runs `rlscale-train` with seeds 1 to 5 and, with seed 1, a control whose GRPO part has learning rate 0; writes
`benchmarks/results/quickstart_seeds.md` and `.json`. Each seed runs its own warm-up in a temporary
folder.

    python benchmarks/quickstart_seeds.py [--seeds 1 2 3 4 5]
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rlscale", "torch", "transformers", "ray")


def run(seed: int, folder: Path, *, name: str, overrides: tuple[str, ...] = ()) -> dict[str, float | int | str]:
    """Runs one seed in a separate process and returns its results."""
    run_dir = folder / re.sub(r"\W+", "-", name)
    seeds = [f"train.seed={seed}", f"rollout.seed={seed}", f"model.init_seed={seed}"]
    command = [sys.executable, "-m", "rlscale.cli.train", *seeds, *overrides, f"run.dir={run_dir}"]
    began = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "RLSCALE_CACHE": str(folder / "cache")})
    wall_s = time.perf_counter() - began
    finished = json.loads((run_dir / "finished.json").read_text())
    return {
        "name": name,
        "seed": seed,
        "initial_eval": finished["initial_eval"],
        "final_eval": finished["final_eval"],
        "rollouts": finished["num_rollouts"],
        "tokens_per_s": finished["num_tokens"] / finished["seconds"],
        "wall_s": wall_s,
    }


def table(rows: list[dict[str, float | int | str]]) -> str:
    lines = ["| run | held-out before | held-out after | rollouts | tokens/s | wall s |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['name']} | {r['initial_eval']:.3f} | {r['final_eval']:.3f} | {r['rollouts']} "
        f"| {r['tokens_per_s']:.0f} | {r['wall_s']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for seed in seeds:
            rows.append(run(seed, folder, name=f"seed {seed}"))
            write(rows)
        rows.append(run(seeds[0], folder, name=f"control, seed {seeds[0]}, lr 0", overrides=("optim.lr=0",)))
        write(rows)


def write(rows: list[dict[str, float | int | str]]) -> None:
    """Writes the results so far."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    where = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, {versions}"
    text = (
        "# Quickstart: held-out reward before and after GRPO\n\n"
        f"{datetime.date.today()}, {where}. 256 held-out prompts, sampled at temperature 0.7. "
        "Wall time is that of the whole command, including the warm-up and the start and end of all processes (the "
        "control reuses the warm-up of its seed). Made by "
        f"`python benchmarks/quickstart_seeds.py`.\n\n{table(rows)}\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart_seeds.md").write_text(text)
    (RESULTS / "quickstart_seeds.json").write_text(json.dumps({"where": where, "runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
