"""Nodes, GPUs, CPUs and memory of a job come from the plan, so that no number is typed twice."""

import pytest

from rlscale.config import load_config_with_notes
from rlscale.launch.node_needs import NodeNeeds, compute_node_needs
from rlscale.plan import find_hardware, make_plan


def needs(*overrides: str, hardware: str = "h100", **values: int) -> NodeNeeds:
    config = load_config_with_notes([*overrides, "cluster.ray_address=auto"], to_run=False).config
    return compute_node_needs(config, make_plan(config, find_hardware(hardware)), **values)


@pytest.mark.parametrize(
    ("overrides", "num_nodes", "gpus", "is_whole"),
    [
        (["experiment=qwen3_4b_grpo"], 1, 8, True),
        (["experiment=qwen3_4b_grpo", "cluster=two_nodes"], 2, 8, True),
        (["experiment=glm45_355b_a32b"], 8, 8, True),
        (["experiment=deepseek_r1"], 16, 8, True),
        (["experiment=qwen3_4b_grpo", "cluster.rollout_num_gpus=2"], 1, 6, False),
    ],
)
def test_gpus_and_nodes_follow_the_placement(overrides: list[str], num_nodes: int, gpus: int, is_whole: bool) -> None:
    found = needs(*overrides)
    assert (found.num_nodes, found.gpus, found.is_whole) == (num_nodes, gpus, is_whole)
    assert found.cpus == 8 * gpus + 4
    assert found.memory_gib % 16 == 0


def test_the_quickstart_needs_a_small_node_without_gpus() -> None:
    found = needs("experiment=quickstart", hardware="cpu")
    assert (found.num_nodes, found.gpus, found.cpus, found.is_whole) == (1, 0, 2, False)
    assert found.ray_cpus == 2
    assert 3 <= found.memory_gib <= 8
    assert found.text == f"1 node with 2 CPUs and {found.memory_gib} GiB"


def test_ray_gets_one_cpu_for_each_actor_where_there_is_no_gpu() -> None:
    found = needs("experiment=quickstart", "cluster.num_gpus_per_node=1", hardware="cpu")
    assert (found.num_nodes, found.cpus, found.ray_cpus) == (2, 2, 1)
    assert needs("experiment=qwen3_4b_grpo").ray_cpus == 68


def test_what_is_offloaded_needs_host_memory() -> None:
    host = ["experiment=qwen3_30b_a3b_gspo"]
    gpu = [*host, "megatron.optimizer_cpu_offload=false", "megatron.overlap_cpu_optimizer_d2h_h2d=false"]
    kept = needs(*gpu, "cluster.offload_train=false").memory_gib
    # 12 bytes for each of 30e9 parameters: the optimiser is on the host, or moves there while engines generate.
    assert needs(*host).memory_gib > kept + 340
    assert needs(*gpu).memory_gib > kept + 340


def test_the_moments_of_adam_on_the_host_need_its_memory() -> None:
    on_host = ["experiment=qwen3_4b_grpo", "optim.name=deepspeed_cpu_adam"]
    plain, host = needs("experiment=qwen3_4b_grpo").memory_gib, needs(*on_host).memory_gib
    # 8 bytes for each of 4e9 parameters, times 1.25, rounded to 16 GiB.
    assert 32 <= host - plain <= 48
    adapters = "train.lora.rank=8"
    assert needs(*on_host, adapters).memory_gib == needs("experiment=qwen3_4b_grpo", adapters).memory_gib


def test_the_reference_of_megatron_core_is_on_the_host() -> None:
    given = ["experiment=qwen3_4b_grpo", "train=megatron", "cluster.offload_train=false"]
    alone, both = (needs(*given, f"algo.use_kl_loss={text}").memory_gib for text in ("false", "true"))
    # 4e9 weights of 2 bytes on each of 4 ranks, times 1.25, rounded to 16 GiB.
    assert 32 <= both - alone <= 48


def test_given_sizes_replace_those_of_the_plan() -> None:
    found = needs("experiment=qwen3_4b_grpo", cpus=3, memory_gib=5)
    assert (found.cpus, found.memory_gib, found.gpus) == (3, 5, 8)
