"""Launch plan: for every engine its processes, with the node, GPUs, arguments and environment of each.

    layout ──> bundles of each process ──> reports of their nodes ──> places ──> arguments and environments

A run asks the actors on the nodes for their reports. `rehearsed_report` invents them, so that the plan of any layout
can be read without a cluster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlscale.engines.launch import RENDEZVOUS_PORTS, EngineLaunch, NodeReport, ProcessPlace
from rlscale.hosts import join_host_port
from rlscale.plan.placement import Layout, fill_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLaunch:
    """One process of an engine as it is started."""

    engine: int
    bundles: tuple[int, ...]  # of the layout, in the order of the engine's ranks on this node
    launch: EngineLaunch
    place: ProcessPlace

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the server, without the key."""
        return self.launch.arguments(self.place)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the launch sets."""
        return self.launch.variables(self.place)


def engine_name(engine: int, kind: str = "engine") -> str:
    return f"{kind} {engine}"


def process_name(engine: int, node_rank: int, kind: str = "engine") -> str:
    """The process of node rank 0 serves the engine's requests, and has its name."""
    return engine_name(engine, kind) + (f" node {node_rank}" if node_rank else "")


def plan_engine(
    launch: EngineLaunch, layout: Layout, engine: int, reports: Sequence[NodeReport]
) -> tuple[ProcessLaunch, ...]:
    """The processes of an engine, by node rank.

    Args:
        launch: settings that all processes share.
        reports: of the nodes of the processes, in their order.
    """
    head, bundles = reports[0], layout.process_bundles(engine)
    launch = launch.for_engine(engine)
    needs_rendezvous = len(reports) > 1 or launch.needs_rendezvous
    rendezvous = join_host_port(head.host, head.rendezvous_port) if needs_rendezvous else None
    bootstrap_port = head.bootstrap_port if launch.needs_bootstrap_port else None
    assert bootstrap_port is not None or not launch.needs_bootstrap_port, "its node must report one"
    return tuple(
        ProcessLaunch(
            engine=engine,
            bundles=bundles[rank],
            launch=replace(launch, name=process_name(engine, rank)),
            place=ProcessPlace(
                host=report.host,
                port=report.port,
                node_rank=rank,
                num_nodes=len(reports),
                rendezvous=rendezvous,
                bootstrap_port=bootstrap_port,
                gpus=report.gpus,
            ),
        )
        for rank, report in enumerate(reports)
    )


def plan_engines(
    launch: EngineLaunch, layout: Layout, report: Callable[[tuple[int, ...]], NodeReport]
) -> tuple[tuple[ProcessLaunch, ...], ...]:
    """The processes of all engines.

    Args:
        report: of the node that has these bundles.
    """
    return tuple(
        plan_engine(launch, layout, engine, [report(bundles) for bundles in layout.process_bundles(engine)])
        for engine in range(layout.num_engines)
    )


def rehearsed_report(layout: Layout, *, on_gpus: bool) -> Callable[[tuple[int, ...]], NodeReport]:
    """Reports of equal, empty nodes, for `plan_engines`: node i is 10.0.0.<i + 1>, and every process has other ports.

    Args:
        on_gpus: False: the nodes have no GPUs.
    """
    places = fill_nodes(layout, gpus_per_node=layout.gpus_per_node)

    def report(bundles: tuple[int, ...]) -> NodeReport:
        node, _ = places[bundles[0]]
        gpus = tuple(str(gpu) for bundle in bundles for gpu in places[bundle][1]) if on_gpus else ()
        return NodeReport(
            host=f"10.0.{node // 250}.{node % 250 + 1}",
            port=20_000 + bundles[0],
            rendezvous_port=25_000 + RENDEZVOUS_PORTS * bundles[0],
            bootstrap_port=15_000 + bundles[0],
            gpus=gpus,
        )

    return report
