"""The generic call of rank actors, without Ray."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.cluster.rank_actor import CONCURRENCY_GROUPS, _RankActor
from rlscale.errors import WorkerError
from rlscale.worker.critic import CriticWorker
from rlscale.worker.policy import PolicyWorker


class FakeWorker:
    """A worker with one method that returns, and two that fail."""

    role = "actor"

    def __init__(self, *_: Any, rank: int, address: str) -> None:
        self.rank, self.address = rank, address

    def add(self, a: int, b: int) -> int:
        return self.rank + a + b

    def fail(self) -> None:
        raise ValueError("boom")

    def fail_elsewhere(self) -> None:
        raise WorkerError("actor rank 7", "connection reset")


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> _RankActor:
    monkeypatch.setattr("rlscale.cluster.rank_actor.log_to", lambda *_: None)
    monkeypatch.setattr("rlscale.cluster.rank_actor.set_secret_env", lambda *_: None)
    monkeypatch.setattr(_RankActor, "worker_class", FakeWorker, raising=False)

    spec: Any = SimpleNamespace(train=SimpleNamespace(env_vars={}))
    world: Any = SimpleNamespace(single_node=True)
    return _RankActor(spec, world, rank=3, log_folder=Path("logs"))


def test_a_call_runs_a_method_of_the_worker(actor: _RankActor) -> None:
    assert actor.call("add", 1, 2) == 6


def test_a_failure_has_the_name_of_the_actor(actor: _RankActor) -> None:
    with pytest.raises(WorkerError, match="actor rank 3: ValueError: boom") as caught:
        actor.call("fail")
    assert caught.value.failed_at_s > 0


def test_a_failure_of_another_rank_keeps_its_name(actor: _RankActor) -> None:
    with pytest.raises(WorkerError, match="actor rank 7"):
        actor.call("fail_elsewhere")


@pytest.mark.parametrize("worker", [PolicyWorker, CriticWorker])
def test_methods_with_their_own_threads_exist(worker: type) -> None:
    assert all(hasattr(worker, method) for method in CONCURRENCY_GROUPS)
