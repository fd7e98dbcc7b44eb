"""Engines of the middleware router: their health, their load, and the choice of one for a request."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

import xxhash

from rlscale.config import RouterPolicy


@dataclass(slots=True, eq=False)
class Worker:
    """One engine behind the router."""

    id: str
    url: str
    slot: int  # decides about its sessions; a restarted engine has the slot of the one that it replaces
    api_key: str | None = None
    is_healthy: bool = False
    num_failures: int = 0  # of health checks, one after the other
    num_running: int = 0
    num_requests: int = 0

    def describe(self) -> dict[str, object]:
        """The entry of `GET /workers`."""
        return {
            "id": self.id,
            "url": self.url,
            "is_healthy": self.is_healthy,
            "load": self.num_running,
            "num_requests": self.num_requests,
        }


class WorkerTable:
    """The engines, and the policy that chooses one of the healthy ones.

    A session is not stored: the engine with the highest hash of (slot, key) gets it (rendezvous hashing, a form of
    consistent hashing). So memory does not grow with sessions, only the sessions of an engine that leaves move, and
    they return to the engine that replaces it.

    Args:
        policy: for requests without a key, and for all requests unless it is `consistent_hashing`.
        failure_threshold: consecutive failed health checks after which an engine gets no requests.

    Example:
        table = WorkerTable(RouterPolicy.consistent_hashing)
        table.record_health(table.add("http://127.0.0.1:30000"), is_healthy=True)
        worker = table.choose("train-7")
    """

    def __init__(self, policy: RouterPolicy, *, failure_threshold: int = 3) -> None:
        self._policy, self._failure_threshold = policy, failure_threshold
        self._workers: dict[str, Worker] = {}
        self._num_added = self._num_turns = 0
        self.num_keyed = self.num_moved = 0  # requests with a session; of them those not sent to its own engine

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def healthy(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.is_healthy]

    def add(self, url: str, *, api_key: str | None = None, replaces: str | None = None) -> Worker:
        """Adds an engine, or returns the one with this URL. It gets requests after its first healthy check.

        Args:
            replaces: URL of an engine that leaves now, whose sessions the new one gets. None: it replaces none.
        """
        url = url.rstrip("/")
        found = self.find(url)
        old = None if replaces is None else self.find(replaces.rstrip("/"))
        if old is not None and old is not found:
            del self._workers[old.id]
        if found is None:
            slot = old.slot if old is not None else self._free_slot()
            self._num_added += 1
            found = Worker(id=f"worker-{self._num_added}", url=url, slot=slot, api_key=api_key)
            self._workers[found.id] = found
        return found

    def find(self, url: str) -> Worker | None:
        return next((worker for worker in self._workers.values() if worker.url == url), None)

    def remove(self, worker_id: str) -> bool:
        """Removes an engine; False: there is none with this id."""
        return self._workers.pop(worker_id, None) is not None

    def record_health(self, worker: Worker, *, is_healthy: bool) -> None:
        """Records a health check: one success makes an engine healthy, `failure_threshold` failures unhealthy."""
        worker.num_failures = 0 if is_healthy else worker.num_failures + 1
        if is_healthy:
            worker.is_healthy = True
        elif worker.num_failures >= self._failure_threshold:
            worker.is_healthy = False

    def choose(self, key: str | None = None, *, without: Collection[str] = ()) -> Worker | None:
        """The engine for a request; None: no engine is left.

        Args:
            key: of its session; None: it has none.
            without: ids of engines that did not accept it.
        """
        up = [worker for worker in self.healthy if worker.id not in without]
        if key is not None and self._policy == RouterPolicy.consistent_hashing and self._workers:
            own = _owner(list(self._workers.values()), key)
            chosen = own if own in up else _owner(up, key) if up else None
            if not without:
                self.num_keyed += 1
                self.num_moved += chosen is not own
            return chosen
        return self._balance(up) if up else None

    def _balance(self, up: list[Worker]) -> Worker:
        if self._policy == RouterPolicy.round_robin:
            self._num_turns += 1
            return up[self._num_turns % len(up)]
        if self._policy == RouterPolicy.random or len(up) == 1:
            return random.choice(up)
        # power_of_two, and requests without a session.
        return min(random.sample(up, 2), key=lambda worker: worker.num_running)

    def _free_slot(self) -> int:
        used = {worker.slot for worker in self._workers.values()}
        return next(slot for slot in range(len(used) + 1) if slot not in used)


def _owner(workers: list[Worker], key: str) -> Worker:
    """The engine with the highest hash of its slot and the key. Equal in every process, unlike Python's `hash`."""
    return max(workers, key=lambda worker: xxhash.xxh3_64_intdigest(f"{worker.slot}/{key}".encode()))
