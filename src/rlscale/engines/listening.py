"""The processes that listen at a port of this machine, from /proc of Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"  # TCP_LISTEN, a state in the tables


def session_listens(session: int, port: int) -> bool:
    """Whether a process of a session listens at a TCP port; also true on systems without /proc.

    Args:
        session: process id of the leader of the session.
        port: of any address.
    """
    if not _TABLES[0].exists():
        return True
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    return any(not sockets.isdisjoint(_open_files(pid)) for pid in _processes_of(session))


def _listening_inodes(port: int) -> Iterator[str]:
    for table in _TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            # Number, local address, remote address, state, ...; the tenth field is the inode. Addresses are in hex.
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _processes_of(session: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in parentheses: state, parent, group, session.
            found = (folder / "stat").read_text().rpartition(")")[2].split()[3]
        except OSError:
            continue  # it ended during the search
        if int(found) == session:
            yield int(folder.name)


def _open_files(pid: int) -> Iterator[str]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for descriptor in descriptors:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue  # closed during the search
