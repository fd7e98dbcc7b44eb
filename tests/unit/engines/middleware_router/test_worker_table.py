"""The choice of an engine: load, health, and sessions that stay."""

from collections import Counter

import pytest

from rlscale.config import RouterPolicy
from rlscale.engines.middleware_router.worker_table import Worker, WorkerTable

KEYS = [f"train-{i}" for i in range(600)]


def table_of(policy: RouterPolicy, num: int, *, threshold: int = 3) -> tuple[WorkerTable, list[Worker]]:
    table = WorkerTable(policy, failure_threshold=threshold)
    workers = [table.add(f"http://127.0.0.1:{4000 + i}") for i in range(num)]
    for worker in workers:
        table.record_health(worker, is_healthy=True)
    return table, workers


def owners(table: WorkerTable) -> dict[str, str]:
    found = {}
    for key in KEYS:
        worker = table.choose(key)
        assert worker is not None
        found[key] = worker.url
    return found


def test_sessions_are_spread_and_each_stays_on_its_engine() -> None:
    table, workers = table_of(RouterPolicy.consistent_hashing, 4)
    before = owners(table)
    assert before == owners(table)
    counts = Counter(before.values())
    assert set(counts) == {worker.url for worker in workers}
    assert min(counts.values()) > len(KEYS) / 8
    assert (table.num_keyed, table.num_moved) == (2 * len(KEYS), 0)


def test_only_sessions_of_the_engine_that_leaves_move_and_they_return() -> None:
    table, workers = table_of(RouterPolicy.consistent_hashing, 4, threshold=1)
    before, dead = owners(table), workers[1]
    table.record_health(dead, is_healthy=False)
    after = owners(table)
    assert dead.url not in after.values()
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == dead.url}
    assert table.num_moved == Counter(before.values())[dead.url]
    new = table.add("http://127.0.0.1:5000", replaces=dead.url)
    table.record_health(new, is_healthy=True)
    assert owners(table) == {key: new.url if url == dead.url else url for key, url in before.items()}
    assert len(table.workers) == 4


def test_requests_without_a_session_go_to_the_less_loaded_engine() -> None:
    for policy in (RouterPolicy.power_of_two, RouterPolicy.consistent_hashing):
        table, (busy, free) = table_of(policy, 2)
        busy.num_running = 5
        assert {table.choose() for _ in range(20)} == {free}


def test_round_robin_takes_each_engine_in_order() -> None:
    table, workers = table_of(RouterPolicy.round_robin, 3)
    chosen = [table.choose("train-1") for _ in range(6)]
    assert chosen[:3] == chosen[3:]
    assert set(chosen) == set(workers)


def test_random_takes_any_engine() -> None:
    table, workers = table_of(RouterPolicy.random, 2)
    assert {table.choose("train-1") for _ in range(200)} == set(workers)


def test_an_engine_is_unhealthy_after_as_many_failures_as_configured() -> None:
    table, (worker,) = table_of(RouterPolicy.power_of_two, 1, threshold=2)
    table.record_health(worker, is_healthy=False)
    assert table.choose() is worker
    table.record_health(worker, is_healthy=False)
    assert table.choose() is None
    table.record_health(worker, is_healthy=True)
    assert table.choose() is worker


@pytest.mark.parametrize("policy", RouterPolicy)
def test_an_engine_that_refused_the_request_is_passed_over(policy: RouterPolicy) -> None:
    table, (one, two) = table_of(policy, 2)
    assert table.choose("train-1", without={one.id}) is two
    assert table.choose("train-1", without={one.id, two.id}) is None


def test_a_new_engine_gets_nothing_before_its_first_check_and_a_known_one_is_not_added_again() -> None:
    table = WorkerTable(RouterPolicy.consistent_hashing)
    worker = table.add("http://a/")
    assert table.choose("train-1") is None
    assert table.add("http://a", replaces="http://a") is worker and table.workers == [worker]
    assert table.remove(worker.id) and not table.remove(worker.id)
