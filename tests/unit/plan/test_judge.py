"""Memory and placement of the engines of a judge or reward model."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlscale.config import RunConfig, load_config_with_notes
from rlscale.plan import HARDWARE, Plan, find_suggestions, make_plan
from rlscale.plan.engine_memory import engine_memory
from rlscale.plan.model_size import judge_architecture, policy_architecture
from rlscale.plan.tables import print_plan

H100 = HARDWARE["h100"]
ON_GPUS = ("experiment=qwen3_4b_grpo", "cluster.device=cuda", "reward=judge", "reward.engine.num_gpus=2")


def config(*overrides: str) -> RunConfig:
    return load_config_with_notes([*ON_GPUS, *overrides], to_run=False).config


def plan(*overrides: str) -> Plan:
    return make_plan(config(*overrides), H100, prompt_tokens=512)


def printed(found: Plan) -> str:
    out = io.StringIO()
    print_plan(found, (), Console(file=out, width=200))
    return out.getvalue()


def test_an_engine_of_the_judge_is_planned_as_a_rollout_engine_with_its_model() -> None:
    arguments = "reward.engine.server_args={mem_fraction_static: 0.7}"
    size = ("reward.engine.num_gpus_per_engine=2", "reward.engine.hf_checkpoint=Qwen/Qwen3-32B", arguments)
    found = plan(*size)
    same = ("model=qwen3_32b", "cluster.rollout_num_gpus_per_engine=2", "sglang.mem_fraction_static=0.7")
    as_rollout = config(*same)
    expected = engine_memory(as_rollout, policy_architecture(as_rollout.model), found.lengths, hardware=H100)
    assert found.judge == expected
    # Qwen3-32B: 32,762,123,264 parameters in bfloat16 over two GPUs.
    assert found.judge is not None and found.judge.weights == 32_762_123_264
    (budget,) = (each for each in found.memory_budgets if each.where == "GPU of a reward engine")
    assert budget.needed == pytest.approx(0.7 * H100.memory_bytes + H100.reserve_bytes)
    assert "memory of a reward engine (sglang), on each of its 2 GPUs" in printed(found)
    assert found.to_dict()["judge"]["total"] == found.judge.total


def test_the_judge_has_gpus_of_its_own() -> None:
    found = plan()
    judges = [(place.node, place.gpu) for place in found.places if place.actors[0].startswith("reward engine")]
    assert judges == [(1, 0), (1, 1)], "trainers and engines use the 8 GPUs of the first node"
    assert all(len(place.actors) == 1 for place in found.places if (place.node, place.gpu) in judges)


def test_without_a_model_the_judge_is_the_starting_model() -> None:
    assert plan().judge == plan("reward.engine.hf_checkpoint=Qwen/Qwen3-4B").judge


def test_a_model_that_is_not_here_is_not_guessed() -> None:
    found = plan("reward.engine.hf_checkpoint=some/judge")
    assert found.judge is None and not [each for each in found.memory_budgets if "reward" in each.where]
    assert "with some/judge; memory and time are not planned: it has no config.json here" in printed(found)


def test_a_reward_model_has_no_output_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000}'
    )
    own = ("reward.type=null", "reward.custom_path=my_rewards:score", f"reward.engine.hf_checkpoint={tmp_path}")
    judge, model = plan(*own), plan(*own, "reward.engine.is_embedding=true")
    assert judge.judge is not None and model.judge is not None
    assert judge.judge.weights - model.judge.weights == 2 * 1000 * 64


@pytest.mark.slow
def test_a_judge_that_does_not_fit_gets_more_gpus() -> None:
    given = config("reward.engine.hf_checkpoint=Qwen/Qwen3-32B", "reward.engine.num_gpus=3")
    small = replace(H100, memory_bytes=48 * 2**30)

    def replan(changed: RunConfig) -> Plan:
        return make_plan(changed, small, prompt_tokens=512, response_tokens=512)

    found = replan(given)
    assert [each.where for each in found.over_budget] == ["GPU of a reward engine"]
    (suggestion,) = find_suggestions(given, found, replan)
    assert suggestion.overrides == "reward.engine.num_gpus_per_engine=2 reward.engine.num_gpus=4"
    # The advice is valid: the changed run loads, and its plan fits.
    changed = config("reward.engine.hf_checkpoint=Qwen/Qwen3-32B", *suggestion.overrides.split())
    assert not replan(changed).over_budget


def test_on_a_cpu_the_judge_shares_the_memory_of_the_machine() -> None:
    given = load_config_with_notes(["experiment=quickstart", "reward=judge", "reward.engine.num_gpus=2"]).config
    found = make_plan(given, HARDWARE["cpu"])
    (budget,) = found.memory_budgets
    assert found.judge is not None and budget.parts["reward engine"] == 2 * found.judge.total
    assert budget.where.endswith("and 2 reward engines")
    architecture = judge_architecture(given, found.model)
    assert architecture == found.model


def test_the_plan_says_that_engines_of_further_models_are_not_planned(tmp_path: Path) -> None:
    policy = "{name: actor, server_groups: [{worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}]}"
    frozen = "{name: ref, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 2}]}"
    (tmp_path / "models.yaml").write_text(f"sglang: [{policy}, {frozen}]")
    given = ["experiment=qwen3_4b_grpo", "cluster.device=cuda", f"sglang.config={tmp_path}/models.yaml"]
    found = make_plan(load_config_with_notes(given, to_run=False).config, H100, prompt_tokens=512)
    assert "frozen    2 engines of 1 GPU each with ref; memory and time are not planned" in printed(found)
