"""Time of the configuration: `--cfg job`, `rlscale-plan` and commands with errors, compared with a bare Hydra app.

    python benchmarks/config_time.py [--repeats N]

Every command runs in a new interpreter and is timed from start to end. Writes results/config_time.md and .json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from machine import machine, sentence

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 1.0
CHECKS_LIMIT_S = 2.0
"""Of a command whose packages, files and folders are checked, too."""

HYDRA_APP = """
import hydra
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore


@dataclass
class Config:
    lr: float = 1e-3


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base="1.3", config_name="config", config_path=None)
def main(config):
    pass


main()
"""

WITHOUT_PEFT = """
import importlib.util, sys

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "peft" else find(name, package)

from rlscale.cli.train import main

main()
"""
"""The program of `rlscale-train` where peft is not installed."""

TRAIN = "import sys; from rlscale.cli.entry import train; sys.exit(train())"
PLAN = "import sys; from rlscale.cli.entry import plan; sys.exit(plan())"
"""The scripts that pip makes of entry points."""

FIVE_ERRORS: Mapping[str, str] = {
    "train.lora.rank": "8",  # the package
    "data.prompt_data": "gone.jsonl",  # the file
    "run.dir": "app.py/run",  # the folder
    "optim.lr": "fast",  # the value
    "batch.global_batch_size": "7",  # the rule
}
FIVE = "rlscale-train with a wrong package, file, folder, value and rule"

COMMANDS: Mapping[str, tuple[Sequence[str], int]] = {
    "rlscale-train --cfg job": (["-c", TRAIN, "--cfg", "job"], 0),
    "rlscale-train experiment=qwen3_4b_grpo --cfg job": (
        ["-c", TRAIN, "experiment=qwen3_4b_grpo", "--cfg", "job"],
        0,
    ),
    "rlscale-plan": (["-c", PLAN], 0),
    "rlscale-plan experiment=qwen3_4b_grpo": (["-c", PLAN, "experiment=qwen3_4b_grpo"], 0),
    "rlscale-plan experiment=qwen3_4b_grpo model=qwen3_32b (does not fit)": (
        ["-c", PLAN, "experiment=qwen3_4b_grpo", "model=qwen3_32b", "cluster.device=cuda"],
        0,
    ),
    "rlscale-train with three errors": (
        ["-c", TRAIN, "algo.eps_clp=0.1", "optim.lr=fast", "batch.global_batch_size=7"],
        2,
    ),
    FIVE: (
        ["-c", WITHOUT_PEFT, "experiment=quickstart", *(f"{key}={value}" for key, value in FIVE_ERRORS.items())],
        2,
    ),
}
"""Arguments of the interpreter and the expected exit code."""


def run(arguments: Sequence[str], code: int, folder: Path) -> float:
    """Runs one command and returns its seconds; one with five errors must report all of them."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=False)
    seconds = time.perf_counter() - began
    assert done.returncode == code, done.stderr.decode()
    if WITHOUT_PEFT in arguments:
        check_reported(done.stderr.decode())
    return seconds


def check_reported(errors: str) -> None:
    """Raises AssertionError unless exactly the keys of `FIVE_ERRORS` are reported."""
    first, *others = errors.splitlines()
    assert first == f"rlscale-train: {len(FIVE_ERRORS)} errors, nothing was started", errors
    assert sorted(line.split()[0] for line in others) == sorted(FIVE_ERRORS), errors


def heavy_modules(arguments: Sequence[str]) -> list[str]:
    """Returns torch and Ray if the command imports them, from `-X importtime`."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=False)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return sorted(names & {"torch", "ray"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(HYDRA_APP)
        bare = "a bare Hydra app, --cfg job"
        commands = {bare: (["app.py", "--cfg", "job"], 0), **COMMANDS}
        for arguments, code in commands.values():
            run(arguments, code, folder)  # writes missing bytecode
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        loads = []
        for _ in range(repeats):
            loads.append(os.getloadavg()[0])
            for title, (arguments, code) in commands.items():
                seconds[title].append(run(arguments, code, folder))
    heavy = {title: heavy_modules(arguments) for title, (arguments, _) in COMMANDS.items()}
    lines = ["| command | median s | min | max | imports of torch, Ray |", "|---|---|---|---|---|"]
    for title, times in seconds.items():
        numbers = (f"{number:.2f}" for number in (statistics.median(times), min(times), max(times)))
        lines.append(f"| `{title}` | " + " | ".join(numbers) + f" | {', '.join(heavy.get(title, [])) or 'none'} |")
    text = (
        f"# Time of the configuration\n\n{sentence(loads)} {repeats} interleaved runs, each in a new interpreter. "
        f"Limit: {LIMIT_S:.1f} s; of the command with five errors {CHECKS_LIMIT_S:.1f} s. "
        "Made by `python benchmarks/config_time.py`.\n\n" + "\n".join(lines) + "\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "config_time.md").write_text(text)
    data = {"machine": machine(), "loads": loads, "seconds": seconds, "imports": heavy}
    (RESULTS / "config_time.json").write_text(json.dumps(data, indent=1) + "\n")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
