"""Ids of requests on the wire, by which an engine aborts them."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from urllib.parse import quote


def routing_key(rid: str) -> str:
    """The session of a request for a router: the part of its name that all requests of a group have.

    That is `train-<group>`, or `eval-<set>-<group>`; the trajectory and the number of the request may follow.
    """
    num_parts = 3 if rid.startswith("eval-") else 2
    return quote("-".join(rid.split("-")[:num_parts]))


class RequestIds:
    """The ids of the open requests of one client, or of all clients of engines behind one router.

    SGLang refuses the id of a request that still runs, and aborts all requests whose id begins with the given one. So
    each request has a new id, also after a restart of the run, and none begins with another: all end with a slash.

    Example:
        ids = RequestIds()
        with ids.open("train-7", 2) as names:  # ["train-7/k3Jx0.0/", "train-7/k3Jx0.1/"]
            ids.of("train-7")  # the same, until the answer is there
    """

    def __init__(self) -> None:
        self._run, self._numbers = secrets.token_urlsafe(4), count()
        self._open: dict[str, list[str]] = {}

    @contextmanager
    def open(self, rid: str | None, number: int) -> Iterator[list[str] | None]:
        """Ids of the `number` requests of a call with the name `rid`; None: the engine chooses them."""
        if rid is None:
            yield None
            return
        call = f"{rid}/{self._run}{next(self._numbers)}"
        names = [f"{call}.{j}/" for j in range(number)]
        self._open.setdefault(rid, []).extend(names)
        try:
            yield names
        finally:
            self._open[rid] = [name for name in self._open[rid] if name not in names]
            if not self._open[rid]:
                del self._open[rid]

    def of(self, rid: str) -> list[str]:
        """Ids of the open requests of a name."""
        return list(self._open.get(rid, ()))
