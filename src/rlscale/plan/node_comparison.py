"""Differences between the nodes of a run: errors for those that break it, warnings for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlscale.errors import Problem
from rlscale.plan.node_facts import CheckedFolder, FolderUse, NodeFacts

MUST_AGREE = ("Python", "torch", "Ray", "rlscale")
"""Versions that must be equal: objects travel between these nodes, and all ranks must compute the same."""

SHOULD_AGREE = ("transformers", "SGLang")

MAX_CLOCK_AHEAD_S = 1.0
MIN_FREE_DISK_BYTES = 2**30
MIN_MEMORY_SHARE = 0.5


def find_problems(nodes: Sequence[NodeFacts], folders: Sequence[CheckedFolder]) -> list[Problem]:
    """Differences that break the run.

    Args:
        nodes: the first one is that of the driver.
    """
    return [
        *(problem for package in MUST_AGREE for problem in _different_versions(nodes, package)),
        *(problem for node in nodes for folder in folders for problem in _missing_folder(node, folder)),
        *(problem for node in nodes for problem in _missing_interfaces(node)),
        *(problem for node in nodes for problem in _unreachable(node)),
        *(problem for node in nodes for problem in _taken_ports(node)),
    ]


def find_warnings(nodes: Sequence[NodeFacts]) -> list[str]:
    """Differences with which the run works, maybe worse."""
    return [
        *(_warn_version(nodes[0], node, package) for node in nodes[1:] for package in _other_packages(nodes[0], node)),
        *(_warn_clock(node) for node in nodes if _is_wrong(node)),
        *(_warn_memory(nodes, node) for node in nodes if _has_little_memory(nodes, node)),
        *(
            f"{node.name} has {node.free_disk_bytes / 2**30:.2f} GiB of free disk for the run folder"
            for node in nodes
            if node.free_disk_bytes < MIN_FREE_DISK_BYTES
        ),
    ]


def _different_versions(nodes: Sequence[NodeFacts], package: str) -> Iterator[Problem]:
    wanted = nodes[0].versions.get(package)
    for node in nodes[1:]:
        found = node.versions.get(package)
        if found != wanted and not (package == "Python" and _is_same_minor(found, wanted)):
            yield Problem(
                path="cluster",
                rule=f"have the same version of {package} on every node",
                value=f"{found or 'none'} on {node.name} and {wanted or 'none'} on {nodes[0].name}",
                fix=f"install the same version of {package} on both, and restart Ray there",
            )


def _is_same_minor(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and first.split(".")[:2] == second.split(".")[:2]


def _missing_folder(node: NodeFacts, folder: CheckedFolder) -> Iterator[Problem]:
    if node.has(folder):
        return
    found = node.folders.get(folder.key)
    if folder.use == FolderUse.shared:
        rule, fix = "be on a file system that all nodes share", "choose a folder of a shared file system"
        value = f"{folder.path}, whose files {node.name} does not see"
    elif found is None:
        rule, fix = "exist on every node", "copy it to this node, or use a folder of a shared file system"
        value = f"{folder.path}, which {node.name} does not have"
    else:
        rule, fix = "hold the same files on every node", "copy it again, or use a folder of a shared file system"
        value = f"{folder.path}, which differs on {node.name}"
    yield Problem(path=folder.key, rule=rule, value=value, fix=fix)


def _missing_interfaces(node: NodeFacts) -> Iterator[Problem]:
    for variable, value in node.chosen_interfaces.items():
        if not _exists(value, node.interfaces, variable):
            has = ", ".join(node.interfaces)
            yield Problem(
                path=f"train.env_vars.{variable}",
                rule="name an interface of every node",
                value=f"{value}, and {node.name} has {has}",
                fix=f"remove it: each node then uses the interface of its Ray address, here {node.interface}",
            )


def _exists(value: str, interfaces: Sequence[str], variable: str) -> bool:
    """Whether a node has the interfaces that a variable names."""
    if not variable.startswith("NCCL"):
        return all(name in interfaces for name in value.split(","))
    # NCCL: `^` before all names to avoid, `=` before exact names, otherwise beginnings of names. One is enough.
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    if value.startswith("="):
        return any(name in interfaces for name in names)
    return value.startswith("^") or any(each.startswith(tuple(names)) for each in interfaces)


def _unreachable(node: NodeFacts) -> Iterator[Problem]:
    for other in node.unreachable:
        yield Problem(
            path="cluster",
            rule="consist of nodes that can connect to each other",
            value=f"{node.name}, which cannot connect to {other}",
            fix="open all TCP ports between the nodes; several networks need `ray start --node-ip-address`",
        )


def _taken_ports(node: NodeFacts) -> Iterator[Problem]:
    for each in node.taken_ports:
        yield Problem(
            path=each.key,
            rule="be free on the nodes that use it",
            value=f"{each.port}, which is in use on {node.name}",
            fix="choose another port, or end the program that listens there",
        )


def _other_packages(first: NodeFacts, node: NodeFacts) -> list[str]:
    return [
        name for name in ("Python", *SHOULD_AGREE) if _warns(name, first.versions.get(name), node.versions.get(name))
    ]


def _warns(package: str, first: str | None, other: str | None) -> bool:
    # Another minor version of Python is an error.
    return first != other and (package != "Python" or _is_same_minor(first, other))


def _warn_version(first: NodeFacts, node: NodeFacts, package: str) -> str:
    found, wanted = (each.versions.get(package) or "none" for each in (node, first))
    return f"{node.name} has {package} {found}, and {first.name} has {wanted}"


def _is_wrong(node: NodeFacts) -> bool:
    return abs(node.clock_ahead_s) - node.clock_error_s > MAX_CLOCK_AHEAD_S


def _warn_clock(node: NodeFacts) -> str:
    return (
        f"the clock of {node.name} differs by {node.clock_ahead_s:+.1f} s: times in logs cannot be compared, and of "
        "several failures the wrong one may be reported as the first"
    )


def _has_little_memory(nodes: Sequence[NodeFacts], node: NodeFacts) -> bool:
    return node.free_memory_bytes < MIN_MEMORY_SHARE * max(each.free_memory_bytes for each in nodes)


def _warn_memory(nodes: Sequence[NodeFacts], node: NodeFacts) -> str:
    most = max(each.free_memory_bytes for each in nodes)
    return f"{node.name} has {node.free_memory_bytes / 2**30:.1f} GiB of free memory, another node {most / 2**30:.1f}"
