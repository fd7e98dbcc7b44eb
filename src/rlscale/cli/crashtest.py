"""The command `rlscale-crashtest`: kills processes of a run and compares its results with an uninterrupted run."""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlscale.cli.secrets import hide_secrets
from rlscale.config import EngineKind, RunConfig, load_config
from rlscale.crashtest.compare import check_samples, compare_metrics, compare_prompts
from rlscale.crashtest.kill_runner import KillPlan, KillRunner, Outcome
from rlscale.crashtest.verdict import Verdict, to_markdown, write_report
from rlscale.crashtest.victims import Victim
from rlscale.errors import ConfigError
from rlscale.observe.jsonl import read_records
from rlscale.secrets import redact_override

PASSED, FAILED, WRONG_INPUT = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Folders and commands of the two runs."""

    folder: Path
    overrides: Sequence[str]

    def command(self, name: str) -> list[str]:
        given = (*self.overrides, f"run.dir={self.folder / name}", f"debug.save_rollout_data={self._template(name)}")
        return [sys.executable, "-m", "rlscale.cli.train", *given]

    def metrics(self, name: str) -> Path:
        return self.folder / name / "metrics.jsonl"

    def dumps(self, name: str) -> Path:
        return self.folder / f"{name}-samples"

    def _template(self, name: str) -> str:
        return f'"{self.dumps(name)}/{{rollout_id}}.jsonl"'


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlscale-crashtest",
        description="Runs an experiment without interruption, then again while killing driver, trainers, engines and "
        "router at random times, and compares the two runs. With the embedded engine and staleness 0 every metric must "
        "be equal to the last bit. No sample may be lost or used twice, and no process may outlive its driver by 30 s.",
        epilog="exit code: 0 passed, 1 failed, 2 the input is wrong",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("experiment", help="name of an experiment, e.g. quickstart")
    add("overrides", nargs="*", help="as for rlscale-train, e.g. data.num_rollout=60")
    add("--kills", type=int, default=20, help="number of processes to kill")
    add(
        "--victims",
        nargs="+",
        choices=[v.value for v in Victim],
        default=None,
        help="kinds of processes to kill; default: all",
    )
    add(
        "--gap",
        nargs=2,
        type=float,
        default=(0.5, 6.0),
        metavar="S",
        help="seconds between kills: minimum, maximum",
    )
    add("--seed", type=int, default=0, help="seed for the order and the times of the kills")
    add("--folder", type=Path, default=Path("runs/crashtest"), help="folder of the two runs; must be new or empty")
    add("--report", type=Path, default=None, help="folder of the report; default: --folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the test. Returns the exit code."""
    if argv is None:
        hide_secrets()
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"rlscale-crashtest: {error}\n")
        return WRONG_INPUT


def _run(args: argparse.Namespace) -> int:
    _check(args)
    overrides = [
        f"+experiment={args.experiment}",
        # Every kill needs a restart, and some kills several.
        "fault_tolerance.enabled=true",
        f"fault_tolerance.max_restarts={10 * args.kills}",
        "logging.console=plain",
        *args.overrides,
    ]
    if not any(override.startswith("checkpoint.save_interval=") for override in args.overrides):
        overrides.append("checkpoint.save_interval=2")
    config = load_config(overrides)
    args.folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(folder=args.folder.absolute(), overrides=overrides)
    _log("uninterrupted run")
    unbroken_s = _run_unbroken(stage)
    _log(f"uninterrupted run finished in {unbroken_s:.0f} s; next: {args.kills} kills")
    outcome = _play(args, stage, config)
    verdict = _judge(args, stage, config, outcome, unbroken_s)
    report = write_report(verdict, args.report or args.folder, f"crashtest_{args.experiment}")
    sys.stdout.write(f"{to_markdown(verdict)}\nreport: {report}\n")
    return PASSED if verdict.passed else FAILED


def _check(args: argparse.Namespace) -> None:
    if args.kills < 1:
        raise ValueError(f"--kills must be at least 1, got {args.kills}")
    low, high = args.gap
    if not 0 <= low <= high:
        raise ValueError(f"--gap must be two numbers of seconds, the smaller one first, got {low:g} {high:g}")
    if args.folder.exists() and any(args.folder.iterdir()):
        raise ValueError(f"--folder must be new or empty, got {args.folder}; remove it or choose another")
    if sys.platform != "linux":
        raise ValueError(f"rlscale-crashtest must run on Linux, got {sys.platform}")


def _run_unbroken(stage: Stage) -> float:
    began = time.monotonic()
    with (stage.folder / "unbroken.log").open("wb") as log:
        code = subprocess.run(stage.command("unbroken"), stdout=log, stderr=log, check=False).returncode
    if code != 0:
        tail = (stage.folder / "unbroken.log").read_text(errors="replace")[-2000:]
        raise ValueError(f"the uninterrupted run must succeed, got exit code {code}:\n{tail}")
    return time.monotonic() - began


def _play(args: argparse.Namespace, stage: Stage, config: RunConfig) -> Outcome:
    rng = random.Random(args.seed)
    kinds = [Victim(name) for name in args.victims] if args.victims else _victims_of(config)
    plan = KillPlan(
        command=stage.command("broken"),
        env={},
        metrics=stage.metrics("broken"),
        log=stage.folder / "broken.log",
        victims=_order(kinds, args.kills, rng),
        gap_s=(args.gap[0], args.gap[1]),
    )
    return KillRunner(plan, rng, report=_log).run()


def _victims_of(config: RunConfig) -> list[Victim]:
    return [victim for victim in Victim if victim != Victim.router or config.router.enabled]


def _order(kinds: Sequence[Victim], num_kills: int, rng: random.Random) -> list[Victim]:
    """Every kind about equally often, in random order."""
    # Shuffle all kinds, again and again, so that no kind is missing among few kills.
    order: list[Victim] = []
    while len(order) < num_kills:
        order += rng.sample(list(kinds), len(kinds))
    return order[:num_kills]


def _judge(args: argparse.Namespace, stage: Stage, config: RunConfig, outcome: Outcome, unbroken_s: float) -> Verdict:
    # Only this combination is deterministic; all other runs differ in their metrics.
    is_deterministic = config.rollout.engine == EngineKind.embedded and config.rollout.max_staleness == 0
    unbroken, broken = stage.metrics("unbroken"), stage.metrics("broken")
    ended = outcome.failure is None
    overrides = map(redact_override, args.overrides)
    # A failed run has no complete dumps to compare.
    faults: list[str] = []
    if ended:
        faults = check_samples(
            stage.dumps("broken"),
            num_groups=config.batch.rollout_batch_size,
            max_staleness=config.rollout.max_staleness,
        ) + compare_prompts(stage.dumps("unbroken"), stage.dumps("broken"))
    return Verdict(
        command=shlex.join(["rlscale-crashtest", args.experiment, *overrides, "--kills", str(args.kills)]),
        machine=f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}",
        unbroken_s=unbroken_s,
        outcome=outcome,
        num_planned=args.kills,
        differences=compare_metrics(unbroken, broken) if ended and is_deterministic else None,
        sample_faults=faults,
        num_records=len(read_records(unbroken)),
    )


def _log(line: str) -> None:
    sys.stderr.write(f"rlscale-crashtest: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
