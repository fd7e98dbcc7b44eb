"""Facts about the nodes of a run, and the table that compares them. No torch and no Ray: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class FolderUse(StrEnum):
    """Requirement on a folder or file that several nodes use."""

    shared = "shared"  # every node sees the files that another one writes
    same = "same"  # every node has the same files; copies are fine
    present = "present"  # every node has it, maybe with other content


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFolder:
    """A folder or file that every node needs.

    Args:
        key: the config key that names it.
        expected: the content that every node must find: of a file of the driver's, names and sizes of all files, or
            `PRESENT`.
    """

    key: str
    path: Path
    use: FolderUse
    expected: str


PRESENT = "present"
"""Content of a folder or file of which only the existence counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedPort:
    """A port that the config names, so that no other can be used.

    Args:
        key: the config key that names it.
        host: address at which it must be free. None: that of the node.
    """

    key: str
    port: int
    host: str | None = None


def token_file(folder: CheckedFolder) -> Path:
    """The file by which other nodes recognise a shared folder. The driver writes and removes it."""
    return folder.path / f".shared_{folder.expected}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """One node, seen from inside, and its clock compared with the driver's."""

    host: str
    address: str
    interface: str | None  # that has the address
    interfaces: tuple[str, ...]  # all of them
    chosen_interfaces: Mapping[str, str]  # variables for gloo and NCCL -> their values
    versions: Mapping[str, str | None]  # of packages; None: not installed
    folders: Mapping[str, str | None]  # key -> what it found in the folder; None: there is no such folder or file
    unreachable: tuple[str, ...] = ()  # nodes to which it cannot connect, each with the reason
    taken_ports: tuple[FixedPort, ...] = ()  # of the config, that another process of the node uses
    free_memory_bytes: int
    free_disk_bytes: int  # of the file system of the run folder
    clock_ahead_s: float = 0.0
    clock_error_s: float = 0.0  # bound of the error of the measurement

    @property
    def name(self) -> str:
        """The node in messages."""
        return f"{self.host} ({self.address})"

    def has(self, folder: CheckedFolder) -> bool:
        """Whether it found the content that every node must find."""
        return self.folders.get(folder.key) == folder.expected


def node_table(nodes: Sequence[NodeFacts], folders: Sequence[CheckedFolder]) -> list[str]:
    """Lines of a table, one row per node; the first node is that of the driver.

    Args:
        folders: that every node needs. The column `paths` names the config keys of those that are missing or differ.
    """
    packages = [name for name in nodes[0].versions if any(node.versions.get(name) for node in nodes)]
    header = ["node", "address", "interface", *packages, "paths", "ports", "clock", "free memory", "free disk"]
    rows = [header, *(_row(node, packages, folders) for node in nodes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(node: NodeFacts, packages: Sequence[str], folders: Sequence[CheckedFolder]) -> list[str]:
    return [
        node.host,
        node.address,
        node.interface or "-",
        *(node.versions.get(name) or "-" for name in packages),
        ", ".join(folder.key for folder in folders if not node.has(folder)) or "same",
        _ports(node),
        _clock(node),
        f"{node.free_memory_bytes / 2**30:.1f} GiB",
        f"{node.free_disk_bytes / 2**30:.1f} GiB",
    ]


def _ports(node: NodeFacts) -> str:
    faults = [f"{each.key} in use" for each in node.taken_ports]
    return ", ".join([*faults, *(["unreachable"] if node.unreachable else [])]) or "free"


def _clock(node: NodeFacts) -> str:
    # Below the error of the measurement the two clocks agree.
    return "same" if abs(node.clock_ahead_s) <= node.clock_error_s else f"{node.clock_ahead_s:+.3f} s"
