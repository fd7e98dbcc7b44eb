"""The processes of a fake SGLang engine; see `tests.fake_sglang`.

The process of node rank 0 serves the requests of the engine once all others have joined it. As in SGLang, every rank
of every process joins the weight groups and receives every weight, and a process does not end when another one dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from aiohttp import web
from torch import Tensor

from rlscale.engines.fake import FakeService, Faults
from rlscale.engines.process_lifetime import die_with_parent
from rlscale.engines.server.engine_service import build_app
from rlscale.engines.server.generate_request import Limits
from rlscale.engines.server.http_server import Server
from rlscale.protocols import IncomingWeights
from rlscale.weight_types import WeightBucket, WeightGroup
from rlscale.weights.receiver import EngineReceiver

JOIN_S = 60.0


def run_server(arguments: dict[str, Any]) -> None:
    """Runs one process; called by rlscale's `serve.py`."""
    record("launches", {"pid": os.getpid(), "argv": sys.argv, "environ": dict(os.environ), "arguments": arguments})
    while Path(sys.argv[1]).with_suffix(".hold").exists():
        time.sleep(0.05)  # a test keeps this process from joining
    node_rank, nodes = int(arguments.get("node_rank", 0)), int(arguments.get("nnodes", 1))
    ranks = int(arguments["tp_size"]) * int(arguments.get("pp_size", 1)) // nodes
    local = LocalRanks(first=node_rank * ranks, number=ranks)
    if node_rank:
        follow(local, split_address(arguments["dist_init_addr"]))
    else:
        asyncio.run(lead(local, arguments, num_followers=nodes - 1))


def record(kind: str, content: Mapping[str, Any]) -> None:
    with Path(sys.argv[1]).with_suffix(f".{kind}.jsonl").open("a") as file:
        file.write(json.dumps(content, default=str) + "\n")


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Rank:
    """One rank of the engine."""

    def __init__(self, number: int) -> None:
        self._number, self._receiver = number, EngineReceiver()

    def join(self, group: WeightGroup, offset: int) -> None:
        self._receiver.join(group, offset + self._number)

    def leave(self, name: str) -> None:
        self._receiver.leave(name)

    def receive(self, bucket: WeightBucket, group_name: str) -> dict[str, str]:
        return self._receiver.open_bucket(bucket, group_name).write(None)


class LocalRanks:
    """The ranks of one process. The first one is here; the others have a process each from the first call on."""

    def __init__(self, *, first: int, number: int) -> None:
        self._first, self._number = first, number
        self._own = Rank(first)
        self._others: list[Connection[Any, Any]] = []

    def join(self, group: WeightGroup, offset: int) -> None:
        while len(self._others) < self._number - 1:
            self._others.append(start_rank(self._first + 1 + len(self._others)))
        self._on_all("join", group, offset)

    def leave(self, name: str) -> None:
        self._on_all("leave", name)

    def receive(self, bucket: WeightBucket, group_name: str) -> dict[str, str]:
        found = self._on_all("receive", bucket, group_name)
        assert all(each == found[0] for each in found)
        record("weights", {"ranks": len(found), "checksums": found[0]})
        checksums: dict[str, str] = found[0]
        return checksums

    def _on_all(self, name: str, *given: Any) -> list[Any]:
        return call_all(self._own, self._others, name, *given)


def start_rank(number: int) -> Connection[Any, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=run_rank, args=(there, number), daemon=True).start()
    return here


def run_rank(connection: Connection[Any, Any], number: int) -> None:
    die_with_parent()
    obey(connection, Rank(number))


def obey(connection: Connection[Any, Any], target: object) -> None:
    """Calls methods of `target` that arrive over the connection, until it breaks."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, *given = connection.recv()
            try:
                connection.send((getattr(target, name)(*given), None))
            except Exception as error:
                connection.send((None, f"{type(error).__name__}: {error}"))


def call_all(own: object, others: Sequence[Connection[Any, Any]], name: str, *given: Any) -> list[Any]:
    """Calls a method here and over all connections at once."""
    for other in others:
        other.send((name, *given))
    results = [getattr(own, name)(*given)]
    for other in others:
        result, failure = other.recv()
        if failure is not None:
            raise RuntimeError(failure)
        results.append(result)
    return results


def follow(local: LocalRanks, head: tuple[str, int]) -> None:
    """Does what the process of node rank 0 does, and stays alive when that one dies, like SGLang's."""
    obey(connect(head), local)
    time.sleep(3600)


def connect(address: tuple[str, int]) -> Connection[Any, Any]:
    end = time.monotonic() + JOIN_S
    while True:
        try:
            return Client(address)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class AllRanks(EngineReceiver):
    """The receiver of the engine: all its ranks, in all its processes."""

    def __init__(self, local: LocalRanks) -> None:
        super().__init__()
        self._local = local
        self.followers: list[Connection[Any, Any]] = []

    @property
    def formats(self) -> list[str]:
        # Not the format of single tensors, which SGLang does not read.
        return ["shared_memory", "delta"]

    def join(self, group: WeightGroup, rank: int) -> None:
        self.everywhere("join", group, rank)

    def leave(self, name: str) -> None:
        self.everywhere("leave", name)

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        return ReceivedByAll(bucket, lambda: self.everywhere("receive", bucket, group_name))

    def everywhere(self, name: str, *given: Any) -> Any:
        return call_all(self._local, self.followers, name, *given)[0]


class ReceivedByAll:
    """A bucket that every rank receives."""

    def __init__(self, bucket: WeightBucket, receive: Callable[[], dict[str, str]]) -> None:
        self.layout, self._receive = bucket, receive

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        return self._receive()


class LeadingService(FakeService):
    """Healthy once all processes have joined."""

    num_missing = 0

    def health(self) -> str | None:
        return f"{self.num_missing} processes have not joined" if self.num_missing else None


async def lead(local: LocalRanks, arguments: dict[str, Any], *, num_followers: int) -> None:
    receiver = AllRanks(local)
    vocab_size = json.loads((Path(arguments["model_path"]) / "config.json").read_text())["vocab_size"]
    service = LeadingService(Limits(vocab_size=vocab_size, max_context_len=4096), Faults(), receiver=receiver)
    service.num_missing = num_followers
    if num_followers:
        listener = Listener(split_address(arguments["dist_init_addr"]))

        def accept() -> None:
            for _ in range(num_followers):
                receiver.followers.append(listener.accept())
                service.num_missing -= 1

        threading.Thread(target=accept, daemon=True).start()
    app = build_app(service, api_key=arguments.get("api_key"))
    app.middlewares.append(record_calls)
    server = Server(app, host=arguments["host"], port=arguments["port"])
    await server.start()
    await server.run()


@web.middleware
async def record_calls(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.method == "POST" and request.path != "/generate":
        body = await request.json() if request.can_read_body else {}
        record("calls", {"path": request.path, "body": body if request.path.endswith("occupation") else {}})
    response: web.StreamResponse = await handler(request)
    return response
