"""The trajectories of the rollout buffer in an SQLite file.

    submit ──> trajectories ── last one of a group ──> complete group ── next_groups ──> reader, position

Every operation is one transaction that is on the disk before it is answered, so that a killed service has lost nothing
that it has accepted. A group is delivered to one reader, at one position of its log: a reader that asks for a position
again, because an answer was lost or because it resumes from a checkpoint, gets the same group again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from rlscale.services.trajectory_record import SubmissionError, TrajectoryRecord

VERSION = 1
MAX_REPLY_BYTES = 64 * 2**20
"""Size of an answer above which further groups wait for the next request."""

_HEADER = b"SQLite format 3\0"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    task TEXT NOT NULL, name TEXT NOT NULL, size INTEGER NOT NULL, num INTEGER NOT NULL,
    completed INTEGER, reader TEXT, position INTEGER, PRIMARY KEY (task, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trajectories (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, task TEXT NOT NULL, name TEXT NOT NULL,
    digest BLOB NOT NULL, body TEXT
);
CREATE INDEX IF NOT EXISTS by_group ON trajectories (task, name);
CREATE INDEX IF NOT EXISTS ready ON groups (task, size, completed) WHERE completed IS NOT NULL AND reader IS NULL;
CREATE UNIQUE INDEX IF NOT EXISTS delivered ON groups (reader, position) WHERE reader IS NOT NULL;
"""


class BufferFileError(ValueError):
    """The file of the buffer cannot be used."""


class ReaderError(ValueError):
    """A reader asks for a position that its log does not have; the message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A delivered group: its position in the log of the reader, and its trajectories as JSON texts."""

    position: int
    name: str
    bodies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """Groups of a task by state."""

    incomplete: int
    ready: int
    other_size: int  # complete groups of another size than the run's
    delivered: int


class BufferStore:
    """An open file of trajectories; this process alone has it. Safe to be called from several threads.

    Args:
        path: created if it does not exist; only its owner may read it.
        keep_groups: delivered groups of each reader whose trajectories are kept, for a run that resumes. None: all.

    Raises:
        BufferFileError: the file cannot be opened, is no file of a buffer, or belongs to a service that runs.

    Example:
        store = BufferStore(Path("buffer.sqlite3"))
        store.submit(parse_submission(body))
        groups = store.next_groups("run 1", task="math", size=8, position=0, number=16)
    """

    def __init__(self, path: Path, *, keep_groups: int | None = None) -> None:
        self._keep_groups, self._lock = keep_groups, Lock()
        self._pruned: dict[str, int] = {}  # by reader: the groups before this position are pruned
        try:
            _check_header(path)
            self._owner = _lock_file(path)
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            cause = getattr(error, "strerror", None) or str(error)
            raise BufferFileError(f"must be a file of the rollout buffer, got {path}; {cause}") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            os.close(self._owner)

    def submit(self, records: Sequence[TrajectoryRecord]) -> int:
        """Stores trajectories, all or none of them, and returns the number of new ones.

        Raises:
            SubmissionError: an id has other contents already, or a group is complete or has another size.
        """
        with self._transaction() as connection:
            places = [f"[{index}]." for index in range(len(records))] if len(records) > 1 else [""]
            return sum(self._insert(connection, *each) for each in zip(records, places, strict=True))

    def next_groups(self, reader: str, *, task: str, size: int, position: int, number: int) -> list[StoredGroup]:
        """At most `number` complete groups from `position` of the reader's log on, which grows as needed.

        Raises:
            ReaderError: the log is shorter than `position`: it is in another file.
        """
        with self._transaction() as connection:
            (end,) = connection.execute(
                "SELECT coalesce(max(position) + 1, 0) FROM groups WHERE reader = ?", (reader,)
            ).fetchone()
            if position > end:
                raise ReaderError(
                    f"position must be at most {end}, the groups of this file that the run has read, got {position}; "
                    f"start the service with the file that the run has read before"
                )
            found = connection.execute(
                "SELECT task, name FROM groups WHERE task = ? AND size = ? "
                "AND completed IS NOT NULL AND reader IS NULL ORDER BY completed LIMIT ?",
                (task, size, max(0, number - (end - position))),
            ).fetchall()
            connection.executemany(
                "UPDATE groups SET reader = ?, position = ? WHERE task = ? AND name = ?",
                [(reader, end + i, *key) for i, key in enumerate(found)],
            )
            if found and self._keep_groups is not None:
                self._prune(connection, reader, before=end + len(found) - self._keep_groups)
            return self._read(connection, reader, range(position, min(position + number, end + len(found))))

    def groups_at(self, reader: str, positions: Sequence[int]) -> list[StoredGroup]:
        """Groups of the reader's log, in the order of `positions`; perhaps only the first ones, if they are large.

        Raises:
            ReaderError: the log does not have one of them.
        """
        with self._transaction() as connection:
            return self._read(connection, reader, positions)

    def count(self, task: str, *, size: int) -> GroupCounts:
        """Numbers of groups; takes time that grows with the number of groups."""
        with self._lock:
            row = self._connection.execute(
                "SELECT count(*) FILTER (WHERE completed IS NULL), "
                "count(*) FILTER (WHERE completed IS NOT NULL AND reader IS NULL AND size = ?), "
                "count(*) FILTER (WHERE completed IS NOT NULL AND reader IS NULL AND size != ?), "
                "count(*) FILTER (WHERE reader IS NOT NULL) FROM groups WHERE task = ?",
                (size, size, task),
            ).fetchone()
        incomplete, ready, other_size, delivered = row
        return GroupCounts(incomplete=incomplete, ready=ready, other_size=other_size, delivered=delivered)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _insert(self, connection: sqlite3.Connection, record: TrajectoryRecord, place: str) -> bool:
        """Whether the trajectory is new."""
        task, name, body = record.task_type, record.group, record.model_dump_json(exclude_defaults=True)
        digest = hashlib.sha256(body.encode()).digest()
        known = connection.execute("SELECT digest FROM trajectories WHERE id = ?", (record.id,)).fetchone()
        if known is not None:
            if known[0] == digest:
                return False
            raise _conflict(place + "id", f"be new, got {record.id!r} with other contents", "use another id")
        row = connection.execute("SELECT size, num FROM groups WHERE task = ? AND name = ?", (task, name)).fetchone()
        size, num = row or (record.group_size, 0)
        if size != record.group_size:
            rule = f"be {size}, as for the other trajectories of group {name!r}, got {record.group_size}"
            raise _conflict(place + "group_size", rule, "use another group")
        if num >= size:
            rule = f"have fewer than its group_size={size} trajectories, got {name!r}, which is complete"
            raise _conflict(place + "group", rule, "use another group")
        cursor = connection.execute(
            "INSERT INTO trajectories (id, task, name, digest, body) VALUES (?, ?, ?, ?, ?)",
            (record.id, task, name, digest, body),
        )
        # The number of the last trajectory is the order in which groups are completed, and delivered.
        completed = cursor.lastrowid if num + 1 == size else None
        connection.execute(
            "INSERT INTO groups (task, name, size, num, completed) VALUES (?, ?, ?, 1, ?) "
            "ON CONFLICT (task, name) DO UPDATE SET num = num + 1, completed = excluded.completed",
            (task, name, size, completed),
        )
        return True

    def _read(self, connection: sqlite3.Connection, reader: str, positions: Sequence[int]) -> list[StoredGroup]:
        groups, num_bytes = list[StoredGroup](), 0
        for position in positions:
            key = connection.execute(
                "SELECT task, name FROM groups WHERE reader = ? AND position = ?", (reader, position)
            ).fetchone()
            rows = (
                key
                and connection.execute(
                    "SELECT body FROM trajectories WHERE task = ? AND name = ? ORDER BY number", key
                ).fetchall()
            )
            if not rows or any(body is None for (body,) in rows):
                raise ReaderError(
                    f"position must be of a group that is kept, got {position}; start the service with the file that "
                    "the run has read before, and with a larger --keep-groups"
                )
            groups.append(StoredGroup(position=position, name=key[1], bodies=tuple(body for (body,) in rows)))
            num_bytes += sum(len(body) for (body,) in rows)
            if num_bytes > MAX_REPLY_BYTES:
                break
        return groups

    def _prune(self, connection: sqlite3.Connection, reader: str, *, before: int) -> None:
        """Deletes the contents of delivered trajectories. Their ids stay known."""
        rows = connection.execute(
            "SELECT task, name FROM groups WHERE reader = ? AND position >= ? AND position < ?",
            (reader, self._pruned.get(reader, 0), before),
        ).fetchall()
        connection.executemany("UPDATE trajectories SET body = NULL WHERE task = ? AND name = ?", rows)
        self._pruned[reader] = max(before, 0)


def _conflict(path: str, rule: str, fix: str) -> SubmissionError:
    return SubmissionError(f"{path} must {rule}; {fix}", status=409)


def _check_header(path: Path) -> None:
    """Raises for a file of another kind, before anything is written next to it."""
    if path.exists() and path.open("rb").read(len(_HEADER)) not in (b"", _HEADER):
        raise sqlite3.DatabaseError("it is no SQLite file")


def _lock_file(path: Path) -> int:
    """A descriptor whose lock shows that a service has this file open."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, "another service has it open") from error
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    # SQLite gives its other files the permissions of this one.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version != VERSION and (version or num_tables):
        raise sqlite3.DatabaseError(f"it has version {version} of the tables instead of {VERSION}")
    connection.execute("PRAGMA journal_mode = WAL")
    # A transaction is answered when it would survive a loss of power.
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    return connection
