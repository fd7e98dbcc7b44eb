"""Launches of the engines of a judge, and their part of a plan."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlscale.config import RunConfig, load_config
from rlscale.driver.reward_engines import build_reward_launch, judge_model
from rlscale.engines.launch import ProcessPlace
from rlscale.engines.launch_sglang import MODEL_PACKAGE, REWARD_MODELS, SERVE
from rlscale.plan.hardware import HARDWARE
from rlscale.plan.placement import build_layout
from rlscale.plan.plan import make_plan
from rlscale.plan.tables import print_plan

PLACE = ProcessPlace(host="127.0.0.1", port=30_000)


def judged(*overrides: str) -> RunConfig:
    return load_config(["experiment=quickstart", "reward.type=judge", "reward.engine.num_gpus=2", *overrides])


def arguments(*overrides: str) -> dict[str, Any]:
    config = judged(*overrides)
    return build_reward_launch(config, config.reward.engine, model_path="judge", num_threads=1).arguments(PLACE)


def test_the_kind_is_that_of_the_rollout_engines_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments()["num_slots"] == judged().rollout.num_slots
    given = arguments("reward.engine.kind=sglang", "reward.engine.num_gpus_per_engine=2")
    assert (given["model_path"], given["tp_size"]) == ("judge", 2) and "is_embedding" not in given


def test_a_reward_model_is_an_embedding_model_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        [
            *("experiment=quickstart", "reward.custom_path=a:b", "reward.engine.num_gpus=1"),
            *("reward.engine.kind=sglang", "reward.engine.is_embedding=true", "reward.engine.max_context_len=512"),
            "reward.engine.server_args={mem_fraction_static: 0.5}",
        ]
    )
    launch = build_reward_launch(config, config.reward.engine, model_path="rm", num_threads=1)
    given = launch.arguments(PLACE)
    assert given["is_embedding"] is True
    assert (given["context_length"], given["mem_fraction_static"]) == (512, 0.5)
    # Its classes have no random bias; those of the user take precedence.
    assert launch.environment(PLACE)[MODEL_PACKAGE] == REWARD_MODELS
    assert (SERVE.parent / REWARD_MODELS / "__init__.py").exists()
    monkeypatch.setenv(MODEL_PACKAGE, "my_models")
    assert launch.environment(PLACE)[MODEL_PACKAGE] == "my_models"


def test_the_model_is_the_starting_one_unless_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    assert judge_model(judged().reward.engine, "start") == "start"
    assert judge_model(judged("reward.engine.hf_checkpoint=judge").reward.engine, "start") == str(tmp_path / "judge")
    assert judge_model(judged("reward.engine.hf_checkpoint=Qwen/Qwen3-4B").reward.engine, "start") == "Qwen/Qwen3-4B"


def test_a_plan_shows_the_engines() -> None:
    config, out = judged(), io.StringIO()
    plan = make_plan(config, HARDWARE["cpu"])
    assert [place.actors for place in plan.places][-2:] == [("reward engine 0",), ("reward engine 1",)]
    print_plan(plan, (), Console(file=out, width=200))
    assert "judge     2 engines of 1 GPU each with the starting model of the run; time is not planned" in out.getvalue()
    assert "reward engines 0-1" in out.getvalue()


def test_a_run_that_generates_nothing_has_no_engines_of_a_judge() -> None:
    assert build_layout(judged()).num_gpus == 4
    assert (
        build_layout(
            judged("debug.train_only=true", 'debug.load_rollout_data="a/{rollout_id}.jsonl"')
        ).num_reward_engines
        == 0
    )
