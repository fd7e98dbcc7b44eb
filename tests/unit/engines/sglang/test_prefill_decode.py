"""Prefill and decode on separate servers: arguments and variables of each process, and those of the router."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale.config import RouterPolicy, load_config
from rlscale.config.server_groups import ServerRole
from rlscale.driver.engines import build_launch
from rlscale.engines.launch_plan import ProcessLaunch, plan_engines, rehearsed_report
from rlscale.engines.launch_sglang import HOST_IP
from rlscale.engines.sglang.prefill_decode import SeparateAddress, count_workers, policy_of, worker_body
from rlscale.engines.sglang.router_process import RouterLaunch
from rlscale.plan.placement import build_layout
from rlscale.types import EngineAddress

SHARED = {"page_size": 16}
WIDE_NODES = "cluster.num_gpus_per_node=8"


def write_file(
    folder: Path, *, size: int = 1, prefill: int = 1, decode: int = 2, decode_size: int | None = None
) -> str:
    """The override with a file of so many engines of these sizes; the groups have different arguments."""
    wide = decode_size or size
    groups: list[dict[str, Any]] = [
        {"worker_type": "prefill", "num_gpus": prefill * size, "overrides": {**SHARED, "chunked_prefill_size": 4096}},
        {"worker_type": "decode", "num_gpus": decode * wide, "overrides": {**SHARED, "max_running_requests": 64}},
    ]
    if decode_size:
        groups[1]["num_gpus_per_engine"] = decode_size
    path = folder / "engines.yaml"
    path.write_text(
        yaml.safe_dump({"sglang": [{"name": "default", "num_gpus_per_engine": size, "server_groups": groups}]})
    )
    return f"sglang.config={path}"


def plan_of(*overrides: str) -> list[ProcessLaunch]:
    """The processes of all engines."""
    config = load_config(["rollout=sglang", "cluster.device=cuda", *overrides])
    layout = build_layout(config)
    launch = build_launch(config, model_path="m", num_threads=1)
    return [each for engine in plan_engines(launch, layout, rehearsed_report(layout, on_gpus=True)) for each in engine]


def separated(process: ProcessLaunch) -> dict[str, Any]:
    """The arguments of a server that depend on its role."""
    names = ("page_size", "chunked_prefill_size", "max_running_requests")
    found = {name: process.arguments[name] for name in names if name in process.arguments}
    return found | {name: value for name, value in process.arguments.items() if name.startswith("disaggregation_")}


def test_every_server_has_its_role_and_prefill_servers_a_port(tmp_path: Path) -> None:
    devices = "sglang.disaggregation_ib_device=mlx5_0"
    backend = "sglang.disaggregation_transfer_backend=nixl"
    planned = plan_of(write_file(tmp_path, prefill=2), backend, devices)
    transfer = {"disaggregation_transfer_backend": "nixl", "disaggregation_ib_device": "mlx5_0"}
    prefill = {**SHARED, **transfer, "disaggregation_mode": "prefill", "chunked_prefill_size": 4096}
    decode = {**SHARED, **transfer, "disaggregation_mode": "decode", "max_running_requests": 64}
    ports = [each.place.bootstrap_port for each in planned]
    assert ports[0] != ports[1] and None not in ports[:2] and ports[2:] == [None, None]
    assert [separated(each) for each in planned] == [
        {**prefill, "disaggregation_bootstrap_port": ports[0]},
        {**prefill, "disaggregation_bootstrap_port": ports[1]},
        decode,
        decode,
    ]
    assert [each.name for each in planned] == ["engine 0", "engine 1", "engine 2", "engine 3"]


def test_processes_of_one_prefill_engine_share_the_port_of_its_first_node(tmp_path: Path) -> None:
    planned = plan_of(write_file(tmp_path, size=4, decode=1), "cluster.num_gpus_per_node=2")
    assert [each.name for each in planned] == ["engine 0", "engine 0 node 1", "engine 1", "engine 1 node 1"]
    ports = [each.arguments.get("disaggregation_bootstrap_port") for each in planned]
    assert ports[0] == ports[1] == planned[0].place.bootstrap_port and ports[2:] == [None, None]
    assert planned[0].place.host != planned[1].place.host
    modes = [each.arguments["disaggregation_mode"] for each in planned]
    assert modes == ["prefill", "prefill", "decode", "decode"]


def test_every_server_has_the_size_of_its_group(tmp_path: Path) -> None:
    planned = plan_of(write_file(tmp_path, size=2, prefill=2, decode_size=4), "model=qwen3_4b", WIDE_NODES)
    assert [each.arguments["tp_size"] for each in planned] == [2, 2, 4, 4]
    assert [each.launch.address(each.place).num_ranks for each in planned] == [2, 2, 4, 4]
    devices = [each.variables["CUDA_VISIBLE_DEVICES"].split(",") for each in planned]
    assert [len(each) for each in devices] == [2, 2, 4, 4]
    places = [(each.place.host, gpu) for each, gpus in zip(planned, devices, strict=True) for gpu in gpus]
    assert len(set(places)) == 12, "no GPU has two engines"
    assert all("nnodes" not in each.arguments for each in planned)
    assert len({each.place.port for each in planned}) == 4


def test_an_engine_over_nodes_is_next_to_engines_of_one_node(tmp_path: Path) -> None:
    file = write_file(tmp_path, size=2, prefill=1, decode=1, decode_size=4)
    planned = plan_of(file, "model=qwen3_4b", "cluster.num_gpus_per_node=2")
    assert [each.name for each in planned] == ["engine 0", "engine 1", "engine 1 node 1"]
    assert [each.arguments.get("nnodes") for each in planned] == [None, 2, 2]
    assert [each.arguments["tp_size"] for each in planned] == [2, 4, 4]
    assert planned[1].arguments["dist_init_addr"] == planned[2].arguments["dist_init_addr"]
    assert len({each.place.host for each in planned}) == 3


def test_colocated_servers_of_two_sizes_have_the_gpus_of_the_trainer_in_order(tmp_path: Path) -> None:
    planned = plan_of(
        write_file(tmp_path, size=2, prefill=2, decode=1, decode_size=4),
        "model=qwen3_4b",
        "cluster.colocate=true",
        "cluster.actor_num_gpus_per_node=8",
        WIDE_NODES,
        "rollout.max_staleness=0",
    )
    assert [each.bundles for each in planned] == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert [each.variables["CUDA_VISIBLE_DEVICES"] for each in planned] == ["0,1", "2,3", "4,5,6,7"]


def test_stages_of_one_group_divide_its_size(tmp_path: Path) -> None:
    file = write_file(tmp_path, size=4, prefill=1, decode=1, decode_size=2)
    path = Path(file.partition("=")[2])
    content = yaml.safe_load(path.read_text())
    content["sglang"][0]["server_groups"][0]["overrides"]["pp_size"] = 2
    path.write_text(yaml.safe_dump(content))
    planned = plan_of(file, "model=qwen3_4b", WIDE_NODES)
    assert [(each.arguments["tp_size"], each.launch.num_ranks) for each in planned] == [(2, 4), (2, 2)]


def test_servers_exchange_the_cache_at_the_address_of_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HOST_IP, raising=False)
    planned = plan_of(write_file(tmp_path))
    assert [each.variables[HOST_IP] for each in planned] == [each.place.host for each in planned]
    monkeypatch.setenv(HOST_IP, "10.9.9.9")  # the user knows a faster network
    assert all(HOST_IP not in each.variables for each in planned)


def test_equal_engines_have_no_role() -> None:
    (process,) = plan_of()
    assert separated(process) == {} and HOST_IP not in process.variables
    assert type(process.launch.address(process.place)) is EngineAddress


def addresses_of(planned: list[ProcessLaunch]) -> list[EngineAddress]:
    return [each.launch.address(each.place) for each in planned if each.place.node_rank == 0]


def router_file(folder: Path, workers: list[EngineAddress], *overrides: str) -> dict[str, Any]:
    """Arguments of the router in their file."""
    config = load_config(["rollout=sglang", "cluster.rollout_num_gpus=2", *overrides]).router
    RouterLaunch(python=Path("/opt/python"), config=config).open(folder, workers)
    arguments: dict[str, Any] = json.loads((folder / "router_arguments.json").read_text())
    return arguments


def test_the_router_pairs_the_servers_and_gets_the_ports(tmp_path: Path) -> None:
    planned = plan_of(write_file(tmp_path, prefill=2, decode=1))
    workers = addresses_of(planned)
    arguments = router_file(tmp_path, workers, "router.policy=round_robin")
    assert arguments["pd_disaggregation"] is True and arguments["worker_urls"] == []
    assert arguments["prefill_urls"] == [[each.place.url, each.place.bootstrap_port] for each in planned[:2]]
    assert arguments["decode_urls"] == [planned[2].place.url]
    assert (arguments["prefill_policy"], arguments["decode_policy"]) == ("round_robin", "round_robin")
    assert count_workers(arguments) == 3


def test_each_group_has_its_policy(tmp_path: Path) -> None:
    given = ("router.prefill_policy=cache_aware", "router.decode_policy=random")
    sizes = write_file(tmp_path, prefill=2, decode=2)
    arguments = router_file(tmp_path, addresses_of(plan_of(sizes)), *given)
    assert (arguments["prefill_policy"], arguments["decode_policy"]) == ("cache_aware", "random")


def test_a_single_server_is_not_chosen_by_the_load_of_two() -> None:
    assert policy_of(RouterPolicy.power_of_two, 1) == RouterPolicy.round_robin
    assert policy_of(RouterPolicy.power_of_two, 2) == RouterPolicy.power_of_two
    assert policy_of(RouterPolicy.cache_aware, 1) == RouterPolicy.cache_aware


def test_a_restarted_server_is_registered_with_its_role_and_new_port() -> None:
    new = SeparateAddress(name="engine 0", url="http://b", role=ServerRole.prefill, bootstrap_port=9)
    decode = SeparateAddress(name="engine 1", url="http://c", role=ServerRole.decode)
    assert worker_body(new) == {"url": "http://b", "worker_type": "prefill", "bootstrap_port": 9}
    assert worker_body(decode) == {"url": "http://c", "worker_type": "decode"}
    assert worker_body(EngineAddress(name="engine 2", url="http://d")) == {"url": "http://d"}
    assert new != SeparateAddress(name="engine 0", url="http://b", role=ServerRole.prefill, bootstrap_port=8)


def test_a_router_has_no_mixed_engines(tmp_path: Path) -> None:
    decode = SeparateAddress(name="engine 1", url="http://c", role=ServerRole.decode)
    with pytest.raises(AssertionError, match="either equal engines or prefill and decode servers"):
        router_file(tmp_path, [EngineAddress(name="engine 0", url="http://a"), decode])
