"""Colocated engines whose node dies: every process of their replacements has the GPUs of one node."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rlscale.cluster.ray_engines import RayEngines
from rlscale.cluster.ray_session import Bundles
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.errors import WorkerError
from rlscale.plan.placement import Layout
from tests.cluster.engine_parts import engines_of, visible_gpus, wait_dead
from tests.engine_launches import build_launch

LAYOUT = Layout(num_trainers=6, num_engines=3, gpus_per_engine=2, colocate=True, gpus_per_node=2)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SglangLaunch:
    return build_launch(tmp_path_factory.mktemp("sglang"), num_gpus=2)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head without GPUs, which soon notices a dead node."""
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 0})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_node(cluster: Cluster, num_gpus: int) -> str:
    """The id of a new node."""
    node = cluster.add_node(num_cpus=8, num_gpus=num_gpus)
    cluster.wait_for_nodes()
    return str(node.node_id)


def kill_node(cluster: Cluster, node_id: str) -> None:
    (node,) = (node for node in cluster.worker_nodes if node.node_id == node_id)
    cluster.remove_node(node, allow_graceful=False)


@ray.remote
def place() -> tuple[str, str]:
    """Node and GPU of a bundle."""
    context = ray.get_runtime_context()
    return context.get_node_id(), str(ray.get_gpu_ids()[0])


def places_of(bundles: Bundles, engine: int) -> list[tuple[str, str]]:
    options = [bundles.options(bundle, LAYOUT.share) for (part,) in [LAYOUT.process_bundles(engine)] for bundle in part]
    found: list[tuple[str, str]] = ray.get([place.options(**each).remote() for each in options])
    return found


async def restart_dead(engines: RayEngines, *, number: int) -> list[int]:
    """Restarts the engines of a dead node as a run does, one after the other as their deaths are found."""
    restarted: list[int] = []
    while len(restarted) < number:
        for index in await wait_dead(engines, within_s=90):
            await engines.restart(index)
            restarted.append(index)
    return sorted(restarted)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_engines_of_a_dead_node_get_whole_nodes_again(launch: SglangLaunch, tmp_path: Path, cluster: Cluster) -> None:
    kept, lost = add_node(cluster, 2), add_node(cluster, 4)

    async def lose_a_node(engines: RayEngines, bundles: Bundles) -> None:
        await engines.start()
        homes = {engine: places_of(bundles, engine) for engine in range(3)}
        on_lost = [engine for engine, places in homes.items() if {node for node, _ in places} == {lost}]
        assert len(on_lost) == 2
        # Each has GPUs for one of the two engines, and Ray moves the four bundles one by one.
        others = {add_node(cluster, 2), add_node(cluster, 2)}
        kill_node(cluster, lost)
        assert await restart_dead(engines, number=2) == on_lost
        for engine, before in homes.items():
            now = places_of(bundles, engine)
            nodes, gpus = {node for node, _ in now}, [gpu for _, gpu in now]
            assert len(nodes) == 1 and nodes <= ({kept} if engine not in on_lost else others)
            assert visible_gpus(tmp_path, f"engine {engine}") == gpus
            assert engine in on_lost or now == before

    with engines_of(launch, LAYOUT, tmp_path) as (engines, bundles):
        asyncio.run(lose_a_node(engines, bundles))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_engine_that_would_be_split_ends_the_run(launch: SglangLaunch, tmp_path: Path, cluster: Cluster) -> None:
    add_node(cluster, 4)
    lost = add_node(cluster, 2)

    async def lose_a_node(engines: RayEngines) -> None:
        await engines.start()
        add_node(cluster, 1)
        add_node(cluster, 1)
        kill_node(cluster, lost)
        await restart_dead(engines, number=1)

    rule = r"the engines: need 2 GPUs of one node for each process, .* 1 of \S+ \(.*\), 1 of \S+ \(.*\); run again when"
    with engines_of(launch, LAYOUT, tmp_path) as (engines, _), pytest.raises(WorkerError, match=rule) as caught:
        asyncio.run(lose_a_node(engines))
    assert not caught.value.died
