"""Waits until all nodes of a job have joined Ray: `python -m rlscale.cluster.wait_for_nodes --label slurm-node n1 n2`.

The address is that of RAY_ADDRESS. Each node was started with `ray start --labels=<label>=<name>`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import ray

from rlscale.cluster.attach import attach
from rlscale.cluster.cluster_address import VARIABLE, ClusterAddress
from rlscale.errors import ConfigError

JOINED, FAILED = 0, 1
POLL_S = 0.5
PROGRESS_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once all nodes have joined, and 1 after the timeout."""
    args = _make_parser().parse_args(argv)
    deadline_s = time.monotonic() + args.timeout
    if not _connect(deadline_s):
        return FAILED
    try:
        missing = wait_for_nodes(args.nodes, label=args.label, deadline_s=deadline_s)
    finally:
        ray.shutdown()
    if not missing:
        return JOINED
    _log(
        f"all nodes must join Ray within {args.timeout:g} s, got {len(args.nodes) - len(missing)} of "
        f"{len(args.nodes)}; missing: {', '.join(missing)}; check that they reach {os.environ['RAY_ADDRESS']}"
    )
    return FAILED


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="+", help="names of the nodes")
    parser.add_argument("--label", required=True, help="label of a Ray node that holds its name")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    return parser


def _connect(deadline_s: float) -> bool:
    """Connects to the head, which may still be starting."""
    cluster = ClusterAddress(address=os.environ[VARIABLE], source=VARIABLE)
    while True:
        try:
            attach(cluster, {"logging_level": logging.ERROR, "log_to_driver": False})
        # Ray raises a RuntimeError while the node of this process is not registered yet.
        except (ConfigError, RuntimeError) as error:
            if time.monotonic() >= deadline_s:
                _log(str(error))
                return False
            time.sleep(POLL_S)
        else:
            return True


def wait_for_nodes(
    names: Sequence[str], *, label: str, deadline_s: float, report: Callable[[str], None] | None = None
) -> list[str]:
    """Waits until a living node of Ray has each of the names; returns those that are missing at the deadline.

    Args:
        names: of the nodes.
        label: of a Ray node that holds its name.
        deadline_s: by `time.monotonic`.
        report: called with a line of progress from time to time. None: standard error.
    """
    report = report or _log
    reported_at_s = time.monotonic()
    while True:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        joined = {node["Labels"].get(label) for node in nodes if node["Alive"]}
        missing = [name for name in names if name not in joined]
        now_s = time.monotonic()
        if not missing or now_s >= deadline_s:
            return missing
        if now_s - reported_at_s >= PROGRESS_S:
            report(f"waiting for {len(missing)} of {len(names)} nodes: {', '.join(missing)}")
            reported_at_s = now_s
        time.sleep(POLL_S)


def _log(line: str) -> None:
    sys.stderr.write(f"rlscale: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
