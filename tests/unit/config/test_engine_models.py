"""The file of `sglang.config`: the keys that it sets, conflicts with them, and files that cannot be used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale.config import RunConfig, load_config
from rlscale.config.load import load_config_with_notes
from rlscale.errors import ConfigError
from rlscale.plan.placement import build_layout, place_actors

SGLANG = ("rollout=sglang", "reward.type=judge")
ACTOR = {
    "name": "actor",
    "update_weights": True,
    "num_gpus_per_engine": 2,
    "server_groups": [{"worker_type": "regular", "num_gpus": 4, "overrides": {"page_size": 16}}],
}
REWARD = {
    "name": "judge",
    "model_path": "org/judge",
    "server_groups": [
        {"worker_type": "regular", "num_gpus": 2, "overrides": {"mem_fraction_static": 0.9, "context_length": 4096}},
        {"worker_type": "regular", "num_gpus": 1, "overrides": {"mem_fraction_static": 0.9, "context_length": 4096}},
    ],
}


def write(folder: Path, *models: Any) -> str:
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"sglang": list(models)}))
    return f"sglang.config={path}"


def load(folder: Path, *models: Any, keys: tuple[str, ...] = ()) -> RunConfig:
    return load_config([*SGLANG, write(folder, *models), *keys])


def problems(folder: Path, *models: Any, keys: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, *models, keys=keys)
    return [str(each) for each in caught.value.problems]


def test_the_models_set_the_keys_of_both_engine_groups(tmp_path: Path) -> None:
    config = load(tmp_path, ACTOR, REWARD, keys=("reward.engine.name=judge", "sglang.page_size=1"))
    assert (config.cluster.rollout_num_gpus, config.cluster.rollout_num_gpus_per_engine) == (4, 2)
    assert config.sglang.server_args == {"page_size": 16}, "the file has priority"
    engine = config.reward.engine
    assert (engine.num_gpus, engine.num_gpus_per_engine, engine.hf_checkpoint) == (3, 1, "org/judge")
    assert engine.max_context_len == 4096 and engine.server_args == {"mem_fraction_static": 0.9}


def test_further_models_are_frozen_and_keep_their_gpus(tmp_path: Path) -> None:
    reference = {"name": "ref", "update_weights": False, "server_groups": [{"worker_type": "regular", "num_gpus": 2}]}
    config = load(tmp_path, ACTOR, reference, REWARD, keys=("reward.engine.name=judge",))
    assert config.reward.engine.num_gpus == 3 and config.sglang.frozen_models == {"ref": {"num_gpus": 2}}
    layout = build_layout(config)
    assert [(each.name, each.num_engines, each.gpus_per_engine) for each in layout.frozen] == [("ref", 2, 1)]
    before = len(replace(layout, frozen=()).bundle_sizes)
    assert layout.bundle_sizes[before:] == (1, 1)
    assert [layout.frozen_layout(0).process_bundles(engine) for engine in (0, 1)] == [((before,),), ((before + 1,),)]
    places = place_actors(layout, gpus_per_node=8)
    assert [actor for place in places for actor in place.actors][-2:] == ["ref engine 0", "ref engine 1"]


def test_without_a_file_nothing_changes() -> None:
    assert load_config(["rollout=sglang"]).sglang.config is None


def test_the_total_of_slime_and_equal_values_are_accepted(tmp_path: Path) -> None:
    for given in ("cluster.rollout_num_gpus=7", "cluster.rollout_num_gpus=4"):
        keys = ("reward.engine.name=judge", given, "reward.engine.num_gpus=3")
        assert load(tmp_path, ACTOR, REWARD, keys=keys).cluster.rollout_num_gpus == 4


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("cluster.rollout_num_gpus=5", "cluster.rollout_num_gpus must be 4, as"),
        ("cluster.rollout_num_gpus_per_engine=1", "cluster.rollout_num_gpus_per_engine must be 2, as"),
        ("reward.engine.num_gpus=1", "reward.engine.num_gpus must be 3, as"),
        ("reward.engine.hf_checkpoint=org/other", "reward.engine.hf_checkpoint must be org/judge, as"),
        ("reward.engine.max_context_len=9", "reward.engine.max_context_len must be 4096, as"),
    ],
)
def test_a_key_with_another_value_is_an_error(tmp_path: Path, key: str, message: str) -> None:
    (found,) = problems(tmp_path, ACTOR, REWARD, keys=("reward.engine.name=judge", key))
    assert found.startswith(message) and found.endswith("(command line)"), found


@pytest.mark.parametrize("name", ["actor", "nope"])
def test_a_wrong_name_is_one_error(tmp_path: Path, name: str) -> None:
    (found,) = problems(tmp_path, ACTOR, REWARD, keys=(f"reward.engine.name={name}",))
    assert found.startswith("reward.engine.name must name a model of") and "name one of judge" in found, found


def test_a_reward_model_without_a_path_is_the_model_of_the_run(tmp_path: Path) -> None:
    frozen = {**REWARD, "model_path": None, "update_weights": False}
    keys = ("reward.engine.name=judge", "reward.engine.hf_checkpoint=org/other")
    assert load(tmp_path, ACTOR, frozen, keys=keys[:1]).reward.engine.hf_checkpoint is None
    (found,) = problems(tmp_path, ACTOR, frozen, keys=keys)
    assert found.startswith("reward.engine.hf_checkpoint must be null, as")


@pytest.mark.parametrize(
    ("models", "keys", "message"),
    [
        ([ACTOR, REWARD], ["reward.engine.name=jugde"], "whose weights are frozen, got jugde; did you mean judge?"),
        ([ACTOR], ["reward.engine.name=actor"], "whose weights are not updated, got actor"),
        ([REWARD], ["reward.engine.name=judge"], "must have one model whose weights are updated, got none"),
        ([ACTOR, {**ACTOR, "name": "two"}], [], "must have one model whose weights are updated, got actor, two"),
        ([ACTOR, ACTOR], [], "must give each model a unique name, got actor twice"),
        ([{**ACTOR, "model_path": "org/x"}], [], "model.hf_checkpoint=null as model_path of actor, whose weights"),
        (["actor"], [], "must have a mapping as sglang[0], got actor"),
        ([{**ACTOR, "name": 3}], [], "must have a string as sglang[0].name, got 3"),
        ([{**ACTOR, "update_weights": "yes"}], [], "must have true or false as sglang[0].update_weights, got yes"),
        ([{**ACTOR, "server_group": []}], [], "got sglang[0].server_group in"),
        ([{"name": "actor"}], [], "must have a list as sglang[0].server_groups, got null"),
    ],
)
def test_models_that_cannot_be_used(tmp_path: Path, models: list[Any], keys: list[str], message: str) -> None:
    assert any(message in each for each in problems(tmp_path, *models, keys=tuple(keys)))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            {"worker_type": "prefill", "num_gpus": 4},
            "a prefill and a decode group in sglang[0].server_groups, got no dec",
        ),
        ({"worker_type": "decode", "num_gpus": 4}, "got no prefill group in"),
        ({"worker_type": "encoder", "num_gpus": 4}, "encoder servers of SGLang 0.5.23 take no weight updates"),
        ({"worker_type": "placeholder", "num_gpus": 4}, "place trainers and engines; remove the group"),
        ({"num_gpus": 4}, "regular, prefill or decode as sglang[0].server_groups[0].worker_type, got null"),
        ({"worker_type": "regular"}, "a number of at least 1 as sglang[0].server_groups[0].num_gpus, got null"),
        ({"worker_type": "regular", "num_gpus": 0}, "server_groups[0].num_gpus, got 0"),
        ({"worker_type": "regular", "num_gpus": True}, "server_groups[0].num_gpus, got true"),
        (
            {"worker_type": "regular", "num_gpus": 3},
            "a multiple of num_gpus_per_engine=2 as sglang[0].server_groups[0]",
        ),
        ({"worker_type": "regular", "num_gpus": 4, "overrides": [1]}, "a mapping as sglang[0].server_groups[0].over"),
        ({"worker_type": "regular", "num_gpus": 4, "override": {}}, "did you mean overrides?"),
        ("regular", "a mapping as sglang[0].server_groups[0], got regular"),
    ],
)
def test_server_groups_that_cannot_be_started(tmp_path: Path, group: Any, message: str) -> None:
    found = problems(tmp_path, {**ACTOR, "server_groups": [group]})
    assert any(message in each for each in found), found


def test_groups_of_a_model_are_equal(tmp_path: Path) -> None:
    groups = [
        {"worker_type": "regular", "num_gpus": 2},
        {"worker_type": "regular", "num_gpus": 4, "overrides": {"a": 1}},
    ]
    assert (
        "must have equal groups in sglang[0].server_groups" in problems(tmp_path, {**ACTOR, "server_groups": groups})[0]
    )


def test_an_override_that_a_run_sets_itself_is_named(tmp_path: Path) -> None:
    groups = [{"worker_type": "regular", "num_gpus": 2, "overrides": {"tp_size": 2, "page_sice": 3}}]
    found = problems(tmp_path, {**ACTOR, "server_groups": groups})
    assert any("sglang.tp_size" in each and "cluster.rollout_num_gpus_per_engine" in each for each in found), found
    assert any("page_sice" in each and "page_size" in each for each in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", ["", "sglang: {}", "sglang: []", "a: [", "\x00", "- 1", "b", "a: " + "[" * 2000, "a: &a [*a]"]
)
def test_a_file_without_models_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(content)
    for given in (path, tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match=r"sglang\.config must name a") as caught:
            load_config(["rollout=sglang", f"sglang.config={given}"])
        assert str(given) in str(caught.value)


def test_the_file_has_no_effect_without_sglang(tmp_path: Path) -> None:
    loaded = load_config_with_notes([write(tmp_path, ACTOR)])
    assert loaded.config.cluster.rollout_num_gpus == 1
    assert any("sglang.config" in warning and "rollout.engine is not sglang" in warning for warning in loaded.warnings)
