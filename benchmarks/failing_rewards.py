"""Compares training with rewards of which 30 % fail at random with training without failures.

Runs `rlscale-train` twice with each of five seeds and compares the rewards on held-out prompts at the end, whose grader
never fails. The failed samples fail at every retry. Both runs train until their curves are flat: after the 140 rollouts
of the quickstart they still rise, and a run with failures is later by the trajectories that it lost. Passed: the 95 %
interval (Student's t) of the paired differences contains 0 and lies within +-0.03. Writes `failing_rewards.md` and
`.json`, and exits with 1 if it is not passed.

    python benchmarks/failing_rewards.py [--seeds 1 2 3 4 5] [--out benchmarks/results]
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parents[1] / "data" / "arithmetic"
SHARE, LIMIT = 0.3, 0.03
NUM_ROLLOUTS = 315
TOLERANCE = 0.02
"""Of the share of failed samples that is measured."""

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t by the number of pairs, with one degree of freedom fewer."""

REWARD = f"""
import json
import random
from pathlib import Path

from rlscale.rewards.builtin import exact_match

ROWS = (json.loads(line) for line in Path({str(DATA / "heldout.jsonl")!r}).read_text().splitlines())
PAIRS = {{(row["metadata"]["a"], row["metadata"]["b"]) for row in ROWS}}


def score(sample, custom):
    row = sample.prompt.metadata
    if (row["a"], row["b"]) not in PAIRS and random.Random(sample.seed).random() < custom["failing"]:
        raise ConnectionError("no answer")
    return exact_match(sample)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The held-out rewards of one seed at the end, and the measured share of failures."""

    seed: int
    whole: float
    failing: float
    failed_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The 95 % interval of the paired differences: mean +- half."""

    mean: float
    half: float

    @property
    def is_passed(self) -> bool:
        """Whether it contains 0 and lies within the limit."""
        return abs(self.mean) <= self.half and abs(self.mean) + self.half <= LIMIT


def interval(pairs: Sequence[Pair]) -> Interval:
    """The interval of `failing - whole`."""
    differences = [pair.failing - pair.whole for pair in pairs]
    return Interval(mean=fmean(differences), half=T_975[len(pairs)] * stdev(differences) / sqrt(len(pairs)))


def run_pair(seed: int, folder: Path) -> Pair:
    """Both runs of one seed."""
    (whole, _), (failing, share) = (train(seed, folder, failing=failing) for failing in (0.0, SHARE))
    if abs(share - SHARE) > TOLERANCE:
        raise RuntimeError(f"the share of failed samples must be {SHARE} +- {TOLERANCE}, got {share:.3f}")
    return Pair(seed=seed, whole=whole, failing=failing, failed_share=share)


def train(seed: int, folder: Path, *, failing: float) -> tuple[float, float]:
    """Trains in a separate process; the held-out reward at the end, and the share of failed trajectories."""
    run_dir = folder / f"seed-{seed}-{failing}"
    overrides = (
        *("reward.custom_path=failing_reward:score", "reward.max_retries=0", f"++custom.failing={failing}"),
        *(f"train.seed={seed}", f"rollout.seed={seed}", f"run.dir={run_dir}"),
        *("eval.stop_reward=null", "eval.interval=35", "eval.n_samples_per_prompt=4"),
        f"data.num_rollout={NUM_ROLLOUTS}",
    )
    command = [sys.executable, "-m", "rlscale.cli.train", *overrides]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "RLSCALE_CACHE": str(folder / "cache")})
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shares = [each.get("trajectories/failed_share", 0.0) for each in metrics if "train/loss" in each]
    return float(json.loads((run_dir / "finished.json").read_text())["final_eval"]), fmean(shares)


def write(pairs: Sequence[Pair], out: Path) -> Interval:
    """Writes the table and the verdict."""
    found = interval(pairs)
    rows = [f"| {p.seed} | {p.whole:.4f} | {p.failing:.4f} | {p.failing - p.whole:+.4f} |" for p in pairs]
    table = "\n".join(["| seed | no failures | 30 % fail | difference |", "|---|---|---|---|", *rows])
    verdict = "passed" if found.is_passed else "not passed"
    text = (
        f"# Rewards of which 30 % fail\n\n{datetime.date.today()}, {os.cpu_count()} cores of {platform.machine()}, "
        f"Python {platform.python_version()}. Held-out reward of the quickstart after "
        f"{NUM_ROLLOUTS} rollouts. Made by "
        f"`python benchmarks/failing_rewards.py`.\n\n{table}\n\nMean difference {found.mean:+.4f} +- {found.half:.4f} "
        f"(95 %): {verdict} (it must contain 0 and lie within +-{LIMIT}).\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "failing_rewards.md").write_text(text)
    content = {"pairs": [asdict(pair) for pair in pairs], **asdict(found), "passed": found.is_passed}
    (out / "failing_rewards.json").write_text(json.dumps(content, indent=2) + "\n")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="2 to 10 of them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if len(args.seeds) not in T_975:
        parser.error(f"--seeds must be {min(T_975)} to {max(T_975)} numbers, got {len(args.seeds)}")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "failing_reward.py").write_text(REWARD)
        pairs = [run_pair(seed, Path(name)) for seed in args.seeds]
    return 0 if write(pairs, args.out).is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
