"""Prefill and decode groups in the file of `sglang.config`: the keys that they set, and groups that cannot be used."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import RunConfig
from rlscale.config.load import load_config_with_notes
from rlscale.config.rules import num_engines, server_groups
from rlscale.config.server_groups import ServerGroup, ServerRole
from rlscale.plan.placement import build_layout, place_actors
from tests.unit.config.test_engine_models import ACTOR, REWARD, load, problems, write


def group(kind: str, num_gpus: int, **overrides: Any) -> dict[str, Any]:
    return {"worker_type": kind, "num_gpus": num_gpus, "overrides": overrides}


def policy(*groups: dict[str, Any], **entries: Any) -> dict[str, Any]:
    return {**ACTOR, "server_groups": list(groups), **entries}


prefill_group = partial(ServerGroup, role=ServerRole.prefill)
decode_group = partial(ServerGroup, role=ServerRole.decode)
PAIR = policy(
    group("decode", 4, page_size=16, max_running_requests=64),
    group("prefill", 2, page_size=16, chunked_prefill_size=4096),
)


def load_pair(folder: Path, *keys: str) -> RunConfig:
    return load(folder, PAIR, REWARD, keys=("reward.engine.name=judge", *keys))


def test_shared_arguments_are_keys_and_others_belong_to_a_group(tmp_path: Path) -> None:
    config = load_pair(tmp_path, "sglang.disaggregation_transfer_backend=nixl")
    assert (config.cluster.rollout_num_gpus, config.cluster.rollout_num_gpus_per_engine) == (6, 2)
    assert config.sglang.server_args == {"page_size": 16, "disaggregation_transfer_backend": "nixl"}
    assert server_groups(config) == (
        prefill_group(num_gpus=2, num_gpus_per_engine=2, server_args={"chunked_prefill_size": 4096}),
        decode_group(num_gpus=4, num_gpus_per_engine=2, server_args={"max_running_requests": 64}),
    )
    assert "num_gpus_per_engine" not in config.sglang.server_groups["prefill"], "engines of one size share a key"
    assert config.router.enabled and not config.router.use_middleware_router
    assert config.reward.engine.num_gpus == 3


WIDE = policy({**group("prefill", 4), "num_gpus_per_engine": 2}, {**group("decode", 8), "num_gpus_per_engine": 4})
"""Engines of two sizes; every group has its own."""


def load_sizes(folder: Path, model: Any, *keys: str) -> RunConfig:
    return load(folder, model, keys=("reward.type=exact_match", "model=qwen3_4b", *keys))


def test_prefill_and_decode_engines_have_different_sizes(tmp_path: Path) -> None:
    config = load_sizes(tmp_path, WIDE)
    assert config.cluster.rollout_num_gpus == 12
    assert [(each.num_engines, each.num_gpus_per_engine) for each in server_groups(config)] == [(2, 2), (2, 4)]
    assert num_engines(config) == 4
    assert config.router.max_connections == 4 * config.sglang.server_concurrency
    again = load_sizes(tmp_path, WIDE, "cluster.rollout_num_gpus=12")
    assert server_groups(again) == server_groups(config)


def test_the_key_is_the_size_of_a_group_without_one(tmp_path: Path) -> None:
    model = policy({**group("prefill", 4), "num_gpus_per_engine": 4}, group("decode", 6), num_gpus_per_engine=None)
    config = load_sizes(tmp_path, model, "cluster.rollout_num_gpus_per_engine=2")
    assert [(each.num_engines, each.num_gpus_per_engine) for each in server_groups(config)] == [(1, 4), (3, 2)]


def test_a_key_that_no_group_reads_is_ignored_with_a_warning(tmp_path: Path) -> None:
    given = ["rollout=sglang", "reward.type=exact_match", "model=qwen3_4b", write(tmp_path, WIDE)]
    found = load_config_with_notes([*given, "cluster.rollout_num_gpus_per_engine=4"]).warnings
    why = "every group in the file of sglang.config has its num_gpus_per_engine"
    assert f"cluster.rollout_num_gpus_per_engine is ignored: {why}" in found


def test_heads_that_servers_divide_in_different_ways_are_a_warning_without_latent_attention(tmp_path: Path) -> None:
    def warnings(*keys: str) -> list[str]:
        given = ["rollout=sglang", "reward.type=exact_match", write(tmp_path, WIDE), *keys]
        return [line for line in load_config_with_notes(given).warnings if "head by head" in line]

    (line,) = warnings("model=qwen3_4b")
    assert "prefill engines divide the heads among 2 ranks, decode engines among 4" in line
    assert warnings("model=deepseek_v3") == []


def test_every_size_is_checked_for_its_group(tmp_path: Path) -> None:
    model = policy({**group("prefill", 4), "num_gpus_per_engine": 4}, {**group("decode", 6), "num_gpus_per_engine": 6})
    found = problems(tmp_path, model, keys=("reward.type=exact_match", "model=qwen3_4b"))
    (heads,) = [each for each in found if "model.num_attention_heads=32, got 6 for decode" in each]
    assert heads.startswith("sglang.server_groups.decode.num_gpus_per_engine must divide")
    assert "(sglang.config; model.num_attention_heads: " in heads
    assert any("prefill and decode engines, or a multiple, got 4 and 6" in each for each in found)
    assert not any("4 for prefill servers" in each for each in found)


def test_further_engines_are_refused(tmp_path: Path) -> None:
    keys = ("reward.type=exact_match", "model=qwen3_4b", "cluster.rollout_max_num_gpus=24")
    (found,) = problems(tmp_path, WIDE, keys=keys)
    assert "cluster.rollout_max_num_gpus must be null with prefill and decode groups in sglang.config, got 24" in found


def test_groups_of_a_role_are_counted_together(tmp_path: Path) -> None:
    model = policy(group("prefill", 2), group("decode", 2, page_size=1), group("decode", 4, page_size=1))
    assert [each.num_gpus for each in server_groups(load(tmp_path, model, keys=("reward.type=exact_match",)))] == [2, 6]


def test_a_plan_names_the_role_of_each_engine(tmp_path: Path) -> None:
    layout = build_layout(load_pair(tmp_path))
    assert (layout.num_engines, layout.num_prefill_engines) == (3, 1)
    places = [actor for place in place_actors(layout, gpus_per_node=16) for actor in place.actors]
    engines = ["prefill engine 0"] * 2 + ["decode engine 1"] * 2 + ["decode engine 2"] * 2
    assert [name for name in places if "engine" in name and "reward" not in name] == engines


def test_a_file_with_regular_groups_has_no_roles(tmp_path: Path) -> None:
    config = load(tmp_path, ACTOR, keys=("reward.type=exact_match",))
    assert config.sglang.server_groups == {} and server_groups(config) == ()
    assert build_layout(config).engine_kind(0) == "engine"


def test_policies_of_the_router_need_the_groups(tmp_path: Path) -> None:
    def warnings(model: Any) -> list[str]:
        given = [
            "rollout=sglang",
            "reward.type=exact_match",
            write(tmp_path, model),
            "router.prefill_policy=cache_aware",
        ]
        return [line for line in load_config_with_notes(given).warnings if "prefill_policy" in line]

    assert warnings(PAIR) == []
    (line,) = warnings(ACTOR)
    assert line == ("router.prefill_policy is ignored: the file of sglang.config has no prefill and decode groups")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            policy(group("prefill", 2)),
            "must have a prefill and a decode group in sglang[0].server_groups, got no decode group in",
        ),
        (policy(group("decode", 2)), "got no prefill group in"),
        (
            policy(group("prefill", 2), group("regular", 2)),
            "must have either regular or prefill and decode groups in sglang[0].server_groups, got both in",
        ),
        (
            policy({**group("prefill", 4), "num_gpus_per_engine": 4}, group("prefill", 2), group("decode", 2)),
            "must have prefill engines of one size in sglang[0].server_groups, got different num_gpus_per_engine in",
        ),
        (
            policy(group("prefill", 2), group("decode", 2, page_size=1), group("decode", 2)),
            "must have equal decode groups in sglang[0].server_groups, got different ones in",
        ),
        (
            policy(group("prefill", 2, page_sice=1), group("decode", 2)),
            "sglang.page_sice must be a key of this group or an argument of SGLang",
        ),
        (
            policy(group("prefill", 2, page_size="big"), group("decode", 2)),
            "sglang.page_size must be an integer or null, got big for prefill servers in",
        ),
        (
            policy(group("prefill", 2, disaggregation_bootstrap_port=9000), group("decode", 2)),
            "sglang.disaggregation_bootstrap_port must not be set, because rlscale sets it, got 9000 for prefill",
        ),
        (
            policy(group("prefill", 2, enable_lora=True), group("decode", 2)),
            "sglang.enable_lora must not be set, because rlscale sets it, got true for prefill servers in",
        ),
    ],
)
def test_groups_that_cannot_be_used(tmp_path: Path, model: Any, message: str) -> None:
    found = problems(tmp_path, model, keys=("reward.type=exact_match",))
    assert any(message in each for each in found), found


def test_a_frozen_model_has_regular_groups(tmp_path: Path) -> None:
    frozen = {**REWARD, "server_groups": PAIR["server_groups"]}
    found = problems(tmp_path, ACTOR, frozen, keys=("reward.engine.name=judge",))
    assert "must have regular groups for judge, whose weights are not updated, got prefill in" in found[0]
