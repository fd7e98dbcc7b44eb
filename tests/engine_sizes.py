"""Parallel sizes and places that a user may set as `sglang.<name>`, for a recipe with engines of eight GPUs."""

from collections.abc import Mapping
from typing import Any

TP_SIZE = 8
BASE = (
    "experiment=qwen3_4b_grpo",
    "model=qwen3_30b_a3b",
    "rollout=sglang",
    "cluster=two_nodes",
    "cluster.device=cuda",
    "cluster.rollout_num_gpus=16",
    f"cluster.rollout_num_gpus_per_engine={TP_SIZE}",
    "train.weight_channel=disk",
)
"""Separate engines of one node each, and a model with 128 experts."""

WORKING: tuple[dict[str, Any], ...] = (
    {},
    {"pp_size": 2},
    {"ep_size": 8},
    {"ep_size": 4, "pp_size": 2},
    {"attn_dp_size": 4},
    {"attn_dp_size": 4, "enable_dp_attention": True},
    {"dp_size": 4, "enable_dp_attention": True},
    {"dp_size": 8, "enable_dp_attention": True, "ep_size": 8},
    {"dp_size": 1},
)

REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"pp_size": 0}, "pp_size", "be a positive divisor of cluster.rollout_num_gpus_per_engine=8, got 0"),
    ({"pp_size": 3}, "pp_size", "be a positive divisor of cluster.rollout_num_gpus_per_engine=8, got 3"),
    ({"pp_size": None}, "pp_size", "be an integer, got null"),
    ({"ep_size": 0}, "ep_size", "be at least 1, got 0"),
    ({"ep_size": -2}, "ep_size", "be at least 1, got -2"),
    ({"ep_size": 3}, "ep_size", "divide the 8 GPUs of a pipeline stage of an engine, got 3; set it to 2"),
    ({"ep_size": 16}, "ep_size", "divide the 8 GPUs of a pipeline stage of an engine, got 16; set it to 8"),
    ({"ep_size": 8, "pp_size": 2}, "ep_size", "divide the 4 GPUs of a pipeline stage of an engine, got 8"),
    ({"dp_size": 0}, "dp_size", "be at least 1, got 0"),
    ({"dp_size": 2}, "dp_size", "be 1 without sglang.enable_dp_attention, got 2"),
    ({"dp_size": 3}, "dp_size", "be 1 without sglang.enable_dp_attention, got 3"),
    ({"dp_size": 3, "enable_dp_attention": True}, "dp_size", "divide the 8 GPUs of a pipeline stage"),
    ({"dp_size": 2, "attn_dp_size": 2}, "dp_size", "be 1 with sglang.attn_dp_size=2, got 2"),
    ({"dp_size": 2, "attn_dp_size": 2, "enable_dp_attention": True}, "dp_size", "be 1 with sglang.attn_dp_size=2"),
    ({"attn_dp_size": 0}, "attn_dp_size", "be at least 1, got 0"),
    ({"attn_dp_size": 3}, "attn_dp_size", "divide the 8 GPUs of a pipeline stage of an engine, got 3; set it to 2"),
    ({"attn_dp_size": 16}, "attn_dp_size", "divide the 8 GPUs of a pipeline stage of an engine, got 16"),
    ({"enable_dp_attention": True}, "enable_dp_attention", "be false without sglang.attn_dp_size above 1, got true"),
    (
        {"enable_dp_attention": True, "dp_size": 1},
        "enable_dp_attention",
        "be false without sglang.attn_dp_size above 1",
    ),
    ({"enable_dp_attention": 1}, "enable_dp_attention", "be true or false, got 1"),
    ({"nnodes": 3}, "nnodes", "not be set, because rlscale sets it, got 3"),
    ({"node_rank": 1}, "node_rank", "not be set, because rlscale sets it, got 1"),
    ({"dist_init_addr": "10.0.0.1:5000"}, "dist_init_addr", "not be set, because rlscale sets it, got 10.0.0.1:5000"),
    ({"base_gpu_id": -1}, "base_gpu_id", "not be set, because rlscale sets it, got -1"),
    ({"gpu_id_step": 0}, "gpu_id_step", "not be set, because rlscale sets it, got 0"),
)
"""Arguments, the one that is refused, and a part of the message."""


def typed(arguments: Mapping[str, Any]) -> list[str]:
    """The words of a command line."""
    words = {True: "true", None: "null"}
    return [
        f"sglang.{name}={words[value] if value is None or value is True else value}"
        for name, value in arguments.items()
    ]
