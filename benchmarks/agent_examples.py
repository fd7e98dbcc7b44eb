"""Checks that every agent example learns: held-out success before and after, and of the same run without its tools.

Runs `rlscale-train +experiment=<example>`, its supervised warm-up included. Writes `results/agent_examples.md` and
`.json`, and the curve of each example to `docs/images/agents/`. Examples that are not run keep their last results.

    python benchmarks/agent_examples.py [--examples calculator search ...] [--seeds 1 2 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine, sentence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "images" / "agents"
START_LIMIT, MIN_GAIN = 0.4, 2.0
"""Largest held-out success before training, and the least factor to that after it."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """An experiment, and the overrides that take its tools away; none: it has no tools."""

    text: str
    without_tools: tuple[str, ...] = ()


NO_TOOLS = ("agent.tools=null", "agent.max_turns=1", "eval.stop_reward=null")
EXAMPLES: dict[str, Example] = {
    "calculator": Example(text="calculator tool over several turns", without_tools=NO_TOOLS),
    "search": Example(text="search over a local corpus, two documents a question", without_tools=NO_TOOLS),
    "code": Example(text="Python in a sandbox", without_tools=(*NO_TOOLS, "sandbox.kind=null")),
    "guess": Example(text="text game as an environment"),
    "framework_agent": Example(text="unchanged agent of openai-agents by a URL"),
    "two_agents": Example(text="two agents that cooperate"),
}


def run(
    name: str,
    folder: Path,
    *,
    seed: int = 1,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs one example in a separate process; returns held-out success by rollout.

    Args:
        seed: of the run; 1 is the default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [f"+experiment={name}", f"rollout.seed={seed}", "logging.console=plain", f"run.dir={folder / 'run'}"]
    command = [sys.executable, "-m", "rlscale.cli.train", *arguments, *overrides]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, env={**os.environ, **(env or {})}, check=True, stdout=log, stderr=subprocess.STDOUT)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [[row["step"], row["eval/reward_mean"]] for row in rows if "eval/reward_mean" in row]
    trained = [row for row in rows if "train/loss" in row]
    return {
        "held_out": held_out,
        "rewards": [row["reward/mean"] for row in trained],
        "seconds": trained[-1]["time"] - trained[0]["time"] if trained else 0.0,
    }


def learns(result: Mapping[str, Any]) -> bool:
    """Whether held-out success starts low enough and at least doubles."""
    first, last = result["held_out"][0][1], result["held_out"][-1][1]
    return bool(first <= START_LIMIT and last >= MIN_GAIN * max(first, 0.05))


def draw(name: str, results: Sequence[Mapping[str, Any]]) -> None:
    """A small picture of held-out success, one line for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})  # the same bytes for the same curve
    figure, axes = plt.subplots(figsize=(3.2, 1.8), layout="constrained")
    for result in results:
        axes.plot(*zip(*result["held_out"], strict=True), color="tab:blue", alpha=0.7)
    axes.set_xlabel("rollout")
    axes.set_ylabel("held-out success")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Means over the seeds."""
    lines = [
        "| example | held-out before | after | factor | without tools, after | rollouts | seconds | seeds | learns |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        results = row["results"]
        first = fmean(each["held_out"][0][1] for each in results)
        last = fmean(each["held_out"][-1][1] for each in results)
        without = f"{row['without_tools']['held_out'][-1][1]:.3f}" if row.get("without_tools") else "-"
        rollouts = fmean(len(each["rewards"]) for each in results)
        seconds = fmean(each["seconds"] for each in results)
        verdict = "yes" if all(map(learns, results)) else "no"
        lines.append(
            f"| {name}: {EXAMPLES[name].text} | {first:.3f} | {last:.3f} | {last / max(first, 1e-9):.1f} | {without} "
            f"| {rollouts:.0f} | {seconds:.0f} | {len(results)} | {verdict} |"
        )
    return "\n".join(lines)


def write(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Results of all examples, in their order, each with the machine that ran it."""
    rows = {name: rows[name] for name in EXAMPLES if name in rows}
    places: dict[str, list[str]] = {}
    for name, row in rows.items():
        places.setdefault(sentence(row["loads"], row["where"]), []).append(f"`{name}`")
    where = "\n".join(f"- {', '.join(names)}: {place}" for place, names in places.items())
    text = (
        "# Agents that learn on two cores\n\n"
        "Made by `python benchmarks/agent_examples.py`. Each example starts from a supervised warm-up on right and\n"
        "wrong demonstrations. Success is on held-out prompts, sampled. Seconds are those of the training, without\n"
        "start and warm-up; other work ran on the machines, so that they are upper limits.\n\n"
        f"{table(rows)}\n\n{where}\n\n"
        "Curves are in `docs/images/agents`.\n"
    )
    (RESULTS / "agent_examples.md").write_text(text)
    (RESULTS / "agent_examples.json").write_text(json.dumps({"examples": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks that every agent example learns.")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--folder", type=Path, default=None, help="of the runs; default: a temporary one")
    options = parser.parse_args()
    stored = RESULTS / "agent_examples.json"
    rows: dict[str, Any] = json.loads(stored.read_text())["examples"] if stored.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        for name in options.examples:
            load = os.getloadavg()[0]
            results = [run(name, root / f"{name}_{seed}", seed=seed) for seed in options.seeds]
            rows[name] = {"results": results, "where": machine(), "loads": [load]}
            if EXAMPLES[name].without_tools:
                rows[name]["without_tools"] = run(name, root / f"{name}_plain", overrides=EXAMPLES[name].without_tools)
            draw(name, results)
            write(rows)
            print(table({name: rows[name]}), flush=True)
    sys.exit(not all(learns(result) for name in options.examples for result in rows[name]["results"]))


if __name__ == "__main__":
    main()
