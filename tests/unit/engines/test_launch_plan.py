"""Processes of engines over several GPUs and nodes: the recipes that have them, and every parallel size."""

from dataclasses import replace
from typing import Any

import pytest

from rlscale.config import load_config
from rlscale.config.load import load_config_with_notes
from rlscale.driver.engines import build_launch
from rlscale.engines.launch import NodeReport
from rlscale.engines.launch_plan import ProcessLaunch, plan_engine, plan_engines, rehearsed_report
from rlscale.plan.placement import build_layout

Planned = tuple[tuple[ProcessLaunch, ...], ...]

EIGHT = "0,1,2,3,4,5,6,7"
SAME = {"model_path": "m", "dtype": "bfloat16", "device": "cuda", "random_seed": 42}
SERVED = {"skip_server_warmup": True, "log_level_http": "warning"}


def plan_of(*overrides: str) -> Planned:
    # Recipes that wait for other features are planned, too.
    config = load_config_with_notes([*overrides, "cluster.device=cuda"], to_run=False).config
    layout = build_layout(config)
    launch = build_launch(config, model_path="m", num_threads=1)
    return plan_engines(launch, layout, rehearsed_report(layout, on_gpus=True))


def by_name(planned: Planned) -> dict[str, ProcessLaunch]:
    return {process.name: process for engine in planned for process in engine}


def described(process: ProcessLaunch) -> tuple[str, str, dict[str, Any]]:
    """Host, GPUs, and all arguments but host, ports, and those that never differ."""
    arguments = process.arguments
    assert (arguments.pop("host"), arguments.pop("port")) == (process.place.host, process.place.port)
    for name, value in (SAME | SERVED).items():
        assert arguments.pop(name) == value
    arguments.pop("cuda_graph_bs_decode", None)
    return process.place.host, process.variables["CUDA_VISIBLE_DEVICES"], arguments


def test_qwen3_30b_has_one_engine_over_the_trainers_node() -> None:
    planned = by_name(plan_of("experiment=qwen3_30b_a3b_gspo"))
    assert list(planned) == ["engine 0"] and planned["engine 0"].launch.num_ranks == 8
    arguments = {"tp_size": 8, "enable_memory_saver": True, "mem_fraction_static": 0.7}
    assert described(planned["engine 0"]) == ("10.0.0.1", EIGHT, arguments)


def test_glm4_9b_has_two_engines_next_to_the_trainer() -> None:
    planned = by_name(plan_of("experiment=glm4_9b_dapo"))
    assert {name: described(each) for name, each in planned.items()} == {
        "engine 0": ("10.0.0.1", "4,5", {"tp_size": 2}),
        "engine 1": ("10.0.0.1", "6,7", {"tp_size": 2}),
    }


def test_glm45_has_two_engines_over_four_nodes_each() -> None:
    planned = by_name(plan_of("experiment=glm45_355b_a32b"))
    shared = {
        "tp_size": 32,
        "nnodes": 4,
        "enable_memory_saver": True,
        "mem_fraction_static": 0.7,
        "enable_dp_attention": True,
        "dp_size": 4,
        "ep_size": 32,
        "enable_dp_lm_head": True,
        "moe_dense_tp_size": 1,
    }
    names = [f"engine {e}" + (f" node {n}" if n else "") for e in range(2) for n in range(4)]
    assert list(planned) == names
    heads = [planned["engine 0"].place.rendezvous, planned["engine 1"].place.rendezvous]
    assert [str(head).split(":")[0] for head in heads] == ["10.0.0.1", "10.0.0.5"]
    for index, name in enumerate(names):
        own = {"node_rank": index % 4, "dist_init_addr": heads[index // 4]}
        assert described(planned[name]) == (f"10.0.0.{index + 1}", EIGHT, shared | own)


def test_deepseek_r1_has_two_engines_over_eight_nodes_each() -> None:
    planned = plan_of("experiment=deepseek_r1")
    assert [len(engine) for engine in planned] == [8, 8]
    host, gpus, arguments = described(planned[1][7])
    assert (host, gpus) == ("10.0.0.16", EIGHT)
    assert arguments == {
        "tp_size": 64,
        "nnodes": 8,
        "node_rank": 7,
        "dist_init_addr": planned[1][0].place.rendezvous,
        "enable_memory_saver": True,
        "mem_fraction_static": 0.7,
        "enable_dp_attention": True,
        "dp_size": 8,
        "ep_size": 64,
        "enable_dp_lm_head": True,
        "moe_dense_tp_size": 1,
        "moe_a2a_backend": "deepep",
        "deepep_mode": "auto",
    }
    assert {process.launch.num_ranks for engine in planned for process in engine} == {64}
    # Rank r of an engine is on the GPU of trainer rank r, or 64 + r.
    bundles = [bundle for engine in planned for process in engine for bundle in process.bundles]
    assert bundles == list(range(128))


PARALLEL = ("experiment=qwen3_4b_grpo", "rollout=sglang", "cluster=two_nodes", "cluster.rollout_num_gpus=16")


@pytest.mark.parametrize(
    ("overrides", "sizes", "num_processes"),
    [
        (("cluster.rollout_num_gpus_per_engine=4",), {"tp_size": 4}, 1),
        (("cluster.rollout_num_gpus_per_engine=4", "sglang.pp_size=2"), {"tp_size": 2, "pp_size": 2}, 1),
        (("cluster.rollout_num_gpus_per_engine=16",), {"tp_size": 16}, 2),
        (("cluster.rollout_num_gpus_per_engine=16", "sglang.pp_size=2"), {"tp_size": 8, "pp_size": 2}, 2),
        (
            (
                "cluster.rollout_num_gpus_per_engine=8",
                "+sglang.enable_dp_attention=true",
                "+sglang.dp_size=4",
                "+sglang.ep_size=8",
            ),
            {"tp_size": 8, "dp_size": 4, "ep_size": 8, "enable_dp_attention": True},
            1,
        ),
    ],
)
def test_parallel_sizes_of_separate_engines(
    overrides: tuple[str, ...], sizes: dict[str, Any], num_processes: int
) -> None:
    given = [word.removeprefix("+") for word in overrides]
    if "sglang.ep_size=8" in given:
        given += ["model=qwen3_30b_a3b"]
    planned = plan_of(*PARALLEL, *given)
    assert [len(engine) for engine in planned] == [num_processes] * len(planned)
    for engine in planned:
        for rank, process in enumerate(engine):
            arguments = process.arguments
            assert {name: arguments[name] for name in sizes} == sizes
            assert arguments.get("nnodes", 1) == num_processes and arguments.get("node_rank", 0) == rank
            # SGLang counts the GPUs that the process sees from 0.
            assert "base_gpu_id" not in arguments and "gpu_id_step" not in arguments
    visible = [(p.place.host, gpu) for engine in planned for p in engine for gpu in p.place.gpus]
    assert len(visible) == len(set(visible)) == 16


def test_attention_over_data_gets_an_address_with_free_ports_on_one_node_too() -> None:
    given = ("cluster.rollout_num_gpus_per_engine=8",)
    for keys in (("sglang.enable_dp_attention=true", "sglang.dp_size=4"), ("sglang.attn_dp_size=4",)):
        (engine, _) = plan_of(*PARALLEL, *given, *keys)
        arguments = engine[0].arguments
        assert arguments["dist_init_addr"] == engine[0].place.rendezvous and arguments["nnodes"] == 1


def test_only_the_embedded_engine_sees_one_gpu() -> None:
    config = load_config(["rollout=embedded", "cluster.rollout_num_gpus=2", "cluster.num_gpus_per_node=3"])
    layout = build_layout(config)
    launch = build_launch(config, model_path="m", num_threads=1)
    planned = plan_engines(replace(launch, device="cuda"), layout, rehearsed_report(layout, on_gpus=True))
    assert [process.variables["CUDA_VISIBLE_DEVICES"] for engine in planned for process in engine] == ["1", "2"]
    assert planned[1][0].arguments["device"] == "cuda" and planned[1][0].place.rendezvous is None


def test_processes_on_ipv6_nodes_meet_at_an_address_in_brackets() -> None:
    config = load_config_with_notes(["experiment=glm45_355b_a32b"], to_run=False).config
    reports = [NodeReport(host=f"fd00::{node + 1}", port=7, rendezvous_port=9) for node in range(4)]
    planned = plan_engine(build_launch(config, model_path="m", num_threads=1), build_layout(config), 0, reports)
    assert {process.place.rendezvous for process in planned} == {"[fd00::1]:9"}
    assert planned[2].place.url == "http://[fd00::3]:7"
