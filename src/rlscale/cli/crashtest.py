"""The command `rlscale-crashtest`: kills processes of a run and compares its results with an uninterrupted run."""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlscale.checkpoint.run_folder import unwritable
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import DefaultsFormatter, OptionParser
from rlscale.cli.secrets import hide_secrets
from rlscale.config import EngineKind, RunConfig, load_config
from rlscale.crashtest.check_ledger import check_ledger, compare_ledgers, untrained_groups
from rlscale.crashtest.compare import check_samples, compare_metrics, compare_prompts
from rlscale.crashtest.kill_runner import KillPlan, KillRunner, Outcome, start_driver
from rlscale.crashtest.namespaces import NodesError, reason_unavailable
from rlscale.crashtest.node_pool import NodePool
from rlscale.crashtest.ray_nodes import RayNodes
from rlscale.crashtest.verdict import Verdict, to_markdown, write_report
from rlscale.crashtest.victims import Victim
from rlscale.errors import ConfigError
from rlscale.observe.jsonl import read_records
from rlscale.plan.placement import build_layout
from rlscale.rollout.group_age import max_lag
from rlscale.secrets import redact_override

PASSED, FAILED, WRONG_INPUT = 0, 1, 2

LOOP_SHARE = 0.6
"""Share of the run's loop that passes in the planned waits."""

REPLACEMENT_S = (0.0, 6.0)
"""Shortest and longest time from the death of a node to the start of a new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Folders and commands of the two runs."""

    folder: Path
    overrides: Sequence[str]
    nodes: NodePool | None = None  # None: on this machine alone

    def command(self, name: str) -> list[str]:
        placed = [] if self.nodes is None else self.nodes.overrides
        given = (
            *self.overrides,
            *placed,
            f"run.dir={self.folder / name}",
            f"debug.save_rollout_data={self._template(name)}",
        )
        return [sys.executable, "-m", "rlscale.cli.train", *given]

    def metrics(self, name: str) -> Path:
        return self.folder / name / "metrics.jsonl"

    def ledger(self, name: str) -> Path:
        return self.folder / name / "ledger.jsonl"

    def dumps(self, name: str) -> Path:
        return self.folder / f"{name}-samples"

    def _template(self, name: str) -> str:
        return f'"{self.dumps(name)}/{{rollout_id}}.jsonl"'


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-crashtest",
        description="Runs an experiment without interruption, then again while killing driver, trainers, engines, "
        "router and nodes at random times, and compares the two runs. With the embedded engine and staleness 0 every "
        "metric must be equal to the last bit. No sample may be lost or used twice, and no process may outlive its "
        "driver by 30 s.",
        epilog="exit code: 0 passed, 1 failed, 2 the input is wrong",
        formatter_class=DefaultsFormatter,
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
        default=None,
        metavar="S",
        help="seconds between kills: minimum, maximum; default: as short as needed for all kills to fit into the run",
    )
    add("--nodes", type=int, default=0, help="run on this number of nodes (network namespaces, as root); 0: here")
    add("--seed", type=int, default=0, help="seed for the order and the times of the kills")
    add("--folder", type=Path, default=Path("runs/crashtest"), help="folder of the two runs; must be new or empty")
    add("--report", type=Path, default=None, help="folder of the report; default: --folder")
    add("--name", default=None, help="name of the report's files; default: crashtest_ and the experiment")
    return parser


@reports_long_paths
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
    except NodesError as error:  # of this machine, not of the input
        sys.stderr.write(f"rlscale-crashtest: {error}\n")
        return FAILED


def _run(args: argparse.Namespace) -> int:
    check_arguments(args)
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
    with _open_nodes(args, config) as nodes:
        stage = Stage(folder=args.folder.absolute(), overrides=overrides, nodes=nodes)
        _log("uninterrupted run")
        unbroken_s = _run_unbroken(stage)
        _log(f"uninterrupted run finished in {unbroken_s:.0f} s; next: {args.kills} kills")
        outcome = _play(args, stage, config)
    verdict = _judge(args, stage, config, outcome, unbroken_s)
    report = write_report(verdict, args.report or args.folder, _report_name(args))
    sys.stdout.write(f"{to_markdown(verdict)}\nreport: {report}\n")
    return PASSED if verdict.passed else FAILED


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError for the first wrong argument."""
    if "=" in args.experiment:
        name = args.experiment.rpartition("=")[2]
        raise ValueError(f"experiment must be a name, got {args.experiment}; write rlscale-crashtest {name}")
    if args.kills < 1:
        raise ValueError(f"--kills must be at least 1, got {args.kills}")
    if args.gap is not None and not 0 <= args.gap[0] <= args.gap[1]:
        low, high = args.gap
        raise ValueError(f"--gap must be two numbers of seconds, the smaller one first, got {low:g} {high:g}")
    if args.nodes < 0:
        raise ValueError(f"--nodes must be at least 0, got {args.nodes}")
    if args.nodes == 0 and Victim.node in (args.victims or ()):
        raise ValueError("--victims must not have node without nodes; add --nodes 2")
    for flag, folder in (("--folder", args.folder), ("--report", args.report)):
        if folder is not None and (problem := unwritable(flag, folder)):
            raise ValueError(problem)
    if args.folder.exists() and any(args.folder.iterdir()):
        raise ValueError(f"--folder must be new or empty, got {args.folder}; remove it or choose another")
    if args.name is not None and args.name != Path(args.name).name:
        raise ValueError(f"--name must be a file name without a folder, got {args.name}; --report names the folder")
    if sys.platform != "linux":
        raise ValueError(f"rlscale-crashtest must run on Linux, got {sys.platform}")
    if args.nodes and (reason := reason_unavailable()) is not None:
        raise ValueError(f"--nodes must be 0 on this machine, got {args.nodes}: {reason}")


@contextmanager
def _open_nodes(args: argparse.Namespace, config: RunConfig) -> Iterator[NodePool | None]:
    """The nodes of `--nodes`, with as many slots as the run needs; None: it runs on this machine alone."""
    if not args.nodes:
        yield None
        return
    num_slots = math.ceil(build_layout(config).num_gpus / args.nodes)
    with RayNodes(args.folder.absolute() / "nodes") as nodes:
        rng = random.Random(args.seed)
        yield NodePool(nodes, num_nodes=args.nodes, num_slots=num_slots, delay_s=REPLACEMENT_S, rng=rng)


def _run_unbroken(stage: Stage) -> float:
    began = time.monotonic()
    with (stage.folder / "unbroken.log").open("wb") as log:
        code = start_driver(stage.command("unbroken"), env={}, output=log, nodes=stage.nodes).wait()
    if code != 0:
        tail = (stage.folder / "unbroken.log").read_text(errors="replace")[-2000:]
        raise ValueError(f"the uninterrupted run must succeed, got exit code {code}:\n{tail}")
    return time.monotonic() - began


def _play(args: argparse.Namespace, stage: Stage, config: RunConfig) -> Outcome:
    rng = random.Random(args.seed)
    kinds = [Victim(name) for name in args.victims] if args.victims else _victims_of(config, has_nodes=bool(args.nodes))
    plan = KillPlan(
        command=stage.command("broken"),
        env={},
        metrics=stage.metrics("broken"),
        log=stage.folder / "broken.log",
        victims=_order(kinds, args.kills, rng),
        gap_s=(args.gap[0], args.gap[1]) if args.gap else choose_gap(stage.metrics("unbroken"), args.kills),
        nodes=stage.nodes,
    )
    return KillRunner(plan, rng, report=_log).run()


def choose_gap(metrics: Path, num_kills: int) -> tuple[float, float]:
    """Shortest and longest wait before a kill, so that all kills fit into the run.

    Most waits begin with the first metrics after the last kill; together they take `LOOP_SHARE` of the time that the
    uninterrupted run spends in its loop. The killed run repeats steps, so that it spends more.
    """
    times = [float(record["time"]) for record in read_records(metrics)]
    mean_s = LOOP_SHARE * (times[-1] - times[0]) / num_kills
    return 0.2 * mean_s, 1.8 * mean_s


def _victims_of(config: RunConfig, *, has_nodes: bool) -> list[Victim]:
    absent = {Victim.router: not config.router.enabled, Victim.node: not has_nodes}
    return [victim for victim in Victim if not absent.get(victim, False)]


def _order(kinds: Sequence[Victim], num_kills: int, rng: random.Random) -> list[Victim]:
    """Every kind about equally often, in random order."""
    # Shuffle all kinds, again and again, so that no kind is missing among few kills.
    order: list[Victim] = []
    while len(order) < num_kills:
        order += rng.sample(list(kinds), len(kinds))
    return order[:num_kills]


def _judge(args: argparse.Namespace, stage: Stage, config: RunConfig, outcome: Outcome, unbroken_s: float) -> Verdict:
    # Only this combination is deterministic; all other runs differ in their metrics. Which responses of a partial
    # rollout finish first depends on the speed of the engines, except in rounds.
    is_deterministic = config.rollout.engine == EngineKind.embedded and config.rollout.max_staleness == 0
    is_deterministic &= not config.sampling.partial_rollout or config.sampling.round_tokens is not None
    unbroken, broken = stage.metrics("unbroken"), stage.metrics("broken")
    ended = outcome.failure is None
    overrides = map(redact_override, args.overrides)
    # A failed run has no complete dumps to compare.
    faults: list[str] = []
    differences: list[str] = []
    if ended:
        ledger, dumps = stage.ledger("broken"), stage.dumps("broken")
        faults = check_samples(
            dumps,
            num_groups=config.batch.rollout_batch_size,
            max_staleness=config.rollout.max_staleness + max_lag(config.sampling),
            untrained=untrained_groups(ledger, group_size=config.batch.n_samples_per_prompt),
        )
        faults += check_ledger(ledger, dumps) + compare_prompts(stage.dumps("unbroken"), dumps)
        if is_deterministic:
            differences = compare_metrics(unbroken, broken) + compare_ledgers(stage.ledger("unbroken"), ledger)
    return Verdict(
        command=shlex.join(["rlscale-crashtest", args.experiment, *overrides, *_shown_options(args)]),
        machine=f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}",
        unbroken_s=unbroken_s,
        outcome=outcome,
        num_planned=args.kills,
        differences=differences if ended and is_deterministic else None,
        sample_faults=faults,
        num_records=len(read_records(unbroken)),
    )


def _report_name(args: argparse.Namespace) -> str:
    return args.name or f"crashtest_{args.experiment}" + ("_nodes" if args.nodes else "")


def _shown_options(args: argparse.Namespace) -> list[str]:
    nodes = ["--nodes", str(args.nodes)] if args.nodes else []
    victims = ["--victims", *args.victims] if args.victims else []
    return [*nodes, "--kills", str(args.kills), *victims]


def _log(line: str) -> None:
    sys.stderr.write(f"rlscale-crashtest: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
