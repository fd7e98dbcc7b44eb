"""The wait for nodes that replace dead ones."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from rlscale.cluster import node_loss as module
from rlscale.cluster import ray_calls
from rlscale.cluster.node_loss import find_cause, wait_for_bundles
from rlscale.cluster.ray_calls import as_worker_error
from rlscale.errors import WorkerError


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.02)


class FakeBundles:
    """Two bundles of a dead node, placed again after some looks."""

    resource = "GPU"

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def find_unplaced(self) -> list[int]:
        self.looks -= 1
        return [2, 3] if self.looks >= 0 else []

    def accept_nodes(self) -> list[str]:
        return ["node7 (10.0.0.8)"]

    def find_lost_nodes(self) -> list[str]:
        return ["node1 (10.0.0.2)"]


async def wait(looks: int, limit_s: float) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    bundles: Any = FakeBundles(looks)
    return await wait_for_bundles(bundles, limit_s=limit_s, report=lines.append), lines


async def test_nothing_is_reported_while_all_nodes_live() -> None:
    assert await wait(0, 60.0) == (["node7 (10.0.0.8)"], [])


async def test_the_replacement_is_reported() -> None:
    found, (waiting, replaced) = await wait(3, 60.0)
    assert found == ["node7 (10.0.0.8)"]
    assert waiting == "node1 (10.0.0.2) died; waiting up to 60 s for other nodes with its GPUs"
    assert replaced == "after 0 s the run has all its GPUs again"


async def test_the_limit_ends_the_wait_and_names_the_node() -> None:
    with pytest.raises(WorkerError) as failure:
        await wait(10**9, 0.0)
    assert str(failure.value) == (
        "node node1 (10.0.0.2): died, and no other node provided its 2 GPUs within fault_tolerance.wait_for_nodes_s=0"
    )


def test_an_actor_that_died_with_its_node_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "node_names", lambda ids: [f"node1 ({ids[0][:2]})"])
    error = RayActorError("00ff", "The actor died because its node has died. Node Id: 8f3a2b1c9d\n\tthe actor's node")
    failure = as_worker_error("engine 1", error)
    assert failure.died
    assert failure.cause == "its node node1 (8f), id 8f3a2b1c, died"


class FakePing:
    """The method `ping` of an actor: raises the given errors, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def remote(self) -> Any:
        answer: Future[None] = Future()
        if self.errors:
            answer.set_exception(self.errors.pop(0))
        else:
            answer.set_result(None)
        return SimpleNamespace(future=lambda: answer)


def actor(*errors: Exception) -> Any:
    return SimpleNamespace(ping=FakePing(*errors))


UNAVAILABLE = ActorUnavailableError("connection closed", b"\0" * 16)
LOST = RayActorError("00ff", "The actor died because its node has died. Node Id: 8f3a2b1c9d")


@pytest.fixture
def named_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "ASK_INTERVAL_S", 0.001)
    monkeypatch.setattr(ray_calls, "node_names", lambda ids: ["node1 (10.0.0.2)"])


@pytest.mark.usefixtures("named_nodes")
async def test_the_cause_of_a_broken_connection_is_the_death_of_a_node() -> None:
    failure = WorkerError("actor rank 0", "RuntimeError: connection closed by peer")
    ranks = [("actor rank 0", actor()), ("actor rank 1", actor(UNAVAILABLE, UNAVAILABLE, LOST))]
    cause = await find_cause(failure, ranks)
    assert (cause.worker, cause.died) == ("actor rank 1", True)
    assert cause.cause == "its node node1 (10.0.0.2), id 8f3a2b1c, died"


@pytest.mark.usefixtures("named_nodes")
async def test_a_failure_of_living_ranks_is_its_own_cause() -> None:
    failure = WorkerError("actor rank 0", "ValueError: loss must be finite")
    assert await find_cause(failure, [("actor rank 0", actor()), ("actor rank 1", actor(UNAVAILABLE))]) is failure
