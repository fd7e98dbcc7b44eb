"""Engines over several nodes with one raylet each: start, death and restart of their processes."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rlscale.cluster.ray_engines import RayEngines
from rlscale.config.server_groups import ServerGroup, ServerRole
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.engines.sglang.prefill_decode import SeparateAddress
from rlscale.errors import ConfigError, WorkerError
from rlscale.plan.placement import Layout
from tests.cluster.engine_parts import engines_of, groups_of_two_sizes, has_ended, last_launch, visible_gpus, wait_dead
from tests.engine_launches import build_launch
from tests.fake_sglang import records

HEAD, OTHER = "engine 0", "engine 0 node 1"


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SglangLaunch:
    return build_launch(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module", autouse=True)
def _three_nodes() -> Iterator[None]:
    """Three raylets with two GPUs each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 2})
    for _ in range(2):
        cluster.add_node(num_cpus=8, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_an_engine_over_two_nodes_lives_and_dies_as_one(launch: SglangLaunch, tmp_path: Path) -> None:
    layout = Layout(num_trainers=2, num_engines=1, gpus_per_engine=4, colocate=False, gpus_per_node=2)
    with engines_of(launch, layout, tmp_path) as (engines, _):
        asyncio.run(assert_one_death_ends_both(engines, tmp_path))


async def assert_one_death_ends_both(engines: RayEngines, folder: Path) -> None:
    """Starts an engine of two processes and kills the second; the restart must replace both."""
    (address,) = await engines.start()
    head, other = last_launch(folder, HEAD), last_launch(folder, OTHER)
    for rank, process in enumerate((head, other)):
        arguments = process["arguments"]
        assert (arguments["tp_size"], arguments["nnodes"], arguments["node_rank"]) == (4, 2, rank)
        assert process["environ"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert head["arguments"]["dist_init_addr"] == other["arguments"]["dist_init_addr"]
    assert address.num_ranks == 4 and address.api_key is not None
    assert address.url.endswith(f":{head['arguments']['port']}")
    assert await engines.find_dead() == {}

    os.kill(other["pid"], signal.SIGKILL)
    dead = await wait_dead(engines)
    assert dead.keys() == {0} and dead[0].startswith(f"{OTHER} ended with status -9")

    again = await engines.restart(0)
    assert has_ended(head["pid"]), "the process of node rank 0 must end with the other one"
    pids = {last_launch(folder, name)["pid"] for name in (HEAD, OTHER)}
    assert len(pids) == 2 and not pids & {head["pid"], other["pid"]}
    assert again.num_ranks == 4 and await engines.find_dead() == {}


def test_a_process_that_dies_while_the_engine_starts_is_named(launch: SglangLaunch, tmp_path: Path) -> None:
    layout = Layout(num_trainers=0, num_engines=1, gpus_per_engine=4, colocate=False, gpus_per_node=2)
    # The process of node rank 0 waits for this one.
    (tmp_path / "engine_0_node_1_arguments.hold").touch()

    async def start_and_kill(engines: RayEngines) -> None:
        start = asyncio.ensure_future(engines.start())
        while not records(tmp_path, OTHER, "launches"):
            await asyncio.sleep(0.05)
        os.kill(last_launch(tmp_path, OTHER)["pid"], signal.SIGKILL)
        await start

    with engines_of(launch, layout, tmp_path) as (engines, _), pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(start_and_kill(engines))
    (failure,) = caught.value.exceptions
    assert isinstance(failure, WorkerError) and failure.died
    assert str(failure).startswith(f"{OTHER}: ended with status -9")


def test_a_colocated_engine_has_the_gpus_of_the_trainers_on_both_nodes(launch: SglangLaunch, tmp_path: Path) -> None:
    layout = Layout(num_trainers=6, num_engines=1, gpus_per_engine=4, colocate=True, gpus_per_node=2)
    with engines_of(launch, layout, tmp_path) as (engines, bundles):
        asyncio.run(engines.start())
        assert bundles.num_nodes == 3
    assert [sorted(visible_gpus(tmp_path, name)) for name in (HEAD, OTHER)] == [["0", "1"], ["0", "1"]]


@pytest.mark.parametrize("colocate", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("given", "tp_size"),
    [
        ({"pp_size": 2}, 2),
        pytest.param({"attn_dp_size": 2}, 4, marks=pytest.mark.nightly),
        ({"enable_dp_attention": True, "dp_size": 4, "ep_size": 4}, 4),
    ],
    ids=str,
)
def test_every_process_has_the_parallel_sizes(
    launch: SglangLaunch, tmp_path: Path, given: dict[str, Any], tp_size: int, colocate: bool
) -> None:
    layout = Layout(num_trainers=2, num_engines=1, gpus_per_engine=4, colocate=colocate, gpus_per_node=2)
    with engines_of(replace(launch, server_args=given), layout, tmp_path) as (engines, _):
        (address,) = asyncio.run(engines.start())
    assert address.num_ranks == 4
    processes = [last_launch(tmp_path, name) for name in (HEAD, OTHER)]
    (meeting_point,) = {process["arguments"]["dist_init_addr"] for process in processes}
    for rank, process in enumerate(processes):
        placed = {"tp_size": tp_size, "nnodes": 2, "node_rank": rank, "dist_init_addr": meeting_point}
        arguments = process["arguments"]
        assert {name: arguments[name] for name in placed | given} == placed | given
        # Each process counts the GPUs that it sees from 0.
        assert not {"base_gpu_id", "gpu_id_step"} & arguments.keys()
        assert sorted(process["environ"]["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]


def test_gpus_that_no_node_has_together_are_refused(launch: SglangLaunch, tmp_path: Path) -> None:
    layout = Layout(num_trainers=6, num_engines=1, gpus_per_engine=4, colocate=True, gpus_per_node=4)
    with (
        pytest.raises(ConfigError, match=r"with 4 GPUs of each, got 2, 2, 2 free GPUs on 3 nodes; .* set it to 2"),
        engines_of(launch, layout, tmp_path),
    ):
        pytest.fail("the engine cannot be placed")


@pytest.mark.nightly
def test_a_prefill_server_restarts_with_its_role_and_another_port(launch: SglangLaunch, tmp_path: Path) -> None:
    groups = tuple(ServerGroup(role=role, num_gpus=2, num_gpus_per_engine=2) for role in ServerRole)
    separate = replace(launch, num_gpus=2, groups=groups)
    layout = Layout(num_trainers=0, num_engines=2, gpus_per_engine=2, colocate=False, gpus_per_node=2)
    with engines_of(separate, layout, tmp_path) as (engines, _):
        asyncio.run(assert_the_role_stays(engines, tmp_path))


async def assert_the_role_stays(engines: RayEngines, folder: Path) -> None:
    """Starts a prefill and a decode server and kills the first; it must come back with the same role."""
    prefill, decode = await engines.start()
    assert isinstance(prefill, SeparateAddress) and isinstance(decode, SeparateAddress)
    assert (prefill.role, decode.role) == (ServerRole.prefill, ServerRole.decode)
    first, other = (last_launch(folder, name)["arguments"] for name in ("engine 0", "engine 1"))
    assert first["disaggregation_mode"] == "prefill" and other["disaggregation_mode"] == "decode"
    assert first["disaggregation_bootstrap_port"] == prefill.bootstrap_port not in (None, first["port"])
    assert decode.bootstrap_port is None and "disaggregation_bootstrap_port" not in other

    os.kill(last_launch(folder, "engine 0")["pid"], signal.SIGKILL)
    assert (await wait_dead(engines)).keys() == {0}
    again = await engines.restart(0)
    assert isinstance(again, SeparateAddress) and again.role == ServerRole.prefill
    assert last_launch(folder, "engine 0")["arguments"]["disaggregation_bootstrap_port"] == again.bootstrap_port
    assert (again.url, again.bootstrap_port) != (prefill.url, prefill.bootstrap_port)


@pytest.mark.nightly
@pytest.mark.parametrize("colocate", [False, True])
def test_engines_of_two_sizes_are_restarted_with_their_own(
    launch: SglangLaunch, tmp_path: Path, colocate: bool
) -> None:
    groups = groups_of_two_sizes(prefill=1, decode=1)
    layout = Layout(num_trainers=6 if colocate else 0, num_engines=2, gpus_per_engine=4, colocate=colocate)
    layout = replace(layout, gpus_per_node=2, num_prefill_engines=1, gpus_per_prefill_engine=2)
    with engines_of(replace(launch, num_gpus=1, groups=groups), layout, tmp_path) as (engines, _):
        asyncio.run(assert_the_size_stays(engines, tmp_path))


async def assert_the_size_stays(engines: RayEngines, folder: Path) -> None:
    """Starts a prefill server of one node and a decode server of two, and kills the second process of the latter."""
    assert [address.num_ranks for address in await engines.start()] == [2, 4]
    prefill = last_launch(folder, "engine 0")
    assert prefill["arguments"]["tp_size"] == 2 and "nnodes" not in prefill["arguments"]
    names = ("engine 1", "engine 1 node 1")
    for rank, started in enumerate(last_launch(folder, name) for name in names):
        arguments = started["arguments"]
        assert (arguments["tp_size"], arguments["nnodes"], arguments["node_rank"]) == (4, 2, rank)
        assert started["environ"]["CUDA_VISIBLE_DEVICES"] in ("0,1", "1,0")

    os.kill(last_launch(folder, names[1])["pid"], signal.SIGKILL)
    assert (await wait_dead(engines)).keys() == {1}
    again = await engines.restart(1)
    assert isinstance(again, SeparateAddress)
    assert (again.num_ranks, again.role) == (4, ServerRole.decode)
    assert [last_launch(folder, name)["arguments"]["tp_size"] for name in names] == [4, 4]
    assert last_launch(folder, "engine 0")["pid"] == prefill["pid"], "the other engine keeps running"
