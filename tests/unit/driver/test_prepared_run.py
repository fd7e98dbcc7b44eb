"""Data and sizes of a run that are read before any process starts."""

import json
import shutil
from pathlib import Path

import pytest

from rlscale import load_config
from rlscale.architectures.architecture import Architecture
from rlscale.architectures.hf_config import read_hf_fields
from rlscale.config import RunConfig
from rlscale.driver.prepared_run import PreparedRun, prepare_run
from rlscale.driver.trainer_spec import build_trainer_spec
from rlscale.driver.wiring import build_loop_config
from rlscale.errors import ConfigError, DataError
from rlscale.models.hf_models import load_hf_fields
from rlscale.models.tiny import build_model
from rlscale.rewards import RewardSpec

LATENT = ("model=tiny_deepseek_v3", "rollout=sglang", "batch.balance_data=true")


QUICKSTART = ("experiment=quickstart", "eval.interval=null", "eval.stop_reward=null")


def config_of(folder: Path, *overrides: str) -> RunConfig:
    data = folder / "prompts.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "2"}\n' * 100)
    return load_config([*QUICKSTART, f"data.prompt_data={data}", *overrides])


def prepared(folder: Path, *overrides: str) -> PreparedRun:
    config = config_of(folder, *overrides)
    return prepare_run(config, str(build_model(config.model, folder)))


def test_the_loop_gets_the_cost_of_its_model(tmp_path: Path) -> None:
    run = prepared(tmp_path, *LATENT)
    expected = Architecture.from_fields(read_hf_fields(run.model_path))
    assert expected.is_latent and expected.num_experts == 8
    assert build_loop_config(run).forward_cost == expected.forward_cost


def test_epochs_count_the_rollouts_of_all_whole_batches(tmp_path: Path) -> None:
    run = prepared(tmp_path, "data.num_rollout=null", "data.num_epoch=3", "batch.rollout_batch_size=8")
    assert (run.num_rollouts, run.rollouts_per_epoch) == (3 * (100 // 8), 100 // 8)
    run = prepared(tmp_path, "data.num_rollout=5", "data.num_epoch=3", "batch.rollout_batch_size=8")
    assert (run.num_rollouts, run.rollouts_per_epoch) == (5, None)


def supervised(folder: Path, *overrides: str) -> PreparedRun:
    data = folder / "held_out.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "2"}\n' * 50)
    own = ("algo=sft", "batch.rollout_batch_size=8", "batch.n_samples_per_prompt=1", "reward.type=exact_match")
    return prepared(folder, *own, "eval.interval=1", f"eval.prompt_data=[few,{data}]", *overrides)


def test_the_loss_on_held_out_labels_has_as_many_batches_as_the_key_says(tmp_path: Path) -> None:
    held_out = supervised(tmp_path, "eval.num_batches=2").held_out
    assert {name: len(prompts) for name, prompts in held_out.items()} == {"few": 2 * 8}


def test_without_engines_supervised_training_has_no_evaluation_by_generation(tmp_path: Path) -> None:
    assert supervised(tmp_path, "reward.type=exact_match").layout.num_engines == 1
    assert supervised(tmp_path, "eval.num_batches=2", "debug.train_only=true").layout.num_engines == 0


def test_without_balancing_no_cost_is_needed(tmp_path: Path) -> None:
    assert build_loop_config(prepared(tmp_path)).forward_cost is None


def test_a_critic_has_no_logits(tmp_path: Path) -> None:
    ranks = ("algo=ppo", "cluster.critic_num_nodes=1", "batch.balance_data=true")
    run = prepared(tmp_path, *ranks)
    critic = build_trainer_spec(run, run_folder=tmp_path).critic
    assert critic is not None and critic.dedicated_ranks is not None and run.forward_cost is not None
    cost = critic.dedicated_ranks.cost
    assert cost is not None and cost.per_logit_row == 0 < run.forward_cost.per_logit_row
    assert (cost.per_token, cost.per_pair) == (run.forward_cost.per_token, run.forward_cost.per_pair)


def test_a_model_of_unknown_shape_cannot_be_balanced(tmp_path: Path) -> None:
    config = config_of(tmp_path, "batch.balance_data=true")
    folder = shutil.copytree(build_model(config.model, tmp_path), tmp_path / "incomplete")
    (folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64}')
    with pytest.raises(ConfigError, match=r"^batch.balance_data must be false with this model, .* lacks num_layers, "):
        prepare_run(config, str(folder))


def test_a_hub_id_without_config_json_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"must have a config\.json, got 'rlscale/never-published'"):
        load_hf_fields("rlscale/never-published")


def with_row_rewards(folder: Path, *types: str) -> RunConfig:
    """A run whose rows name these rewards."""
    config = config_of(folder)
    rows = [{"prompt": "1+1=", "label": "2", "metadata": {"rm_type": name}} for name in types]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 16))
    return config


def test_the_rewards_that_rows_name_are_prepared(tmp_path: Path) -> None:
    config = with_row_rewards(tmp_path, "f1")
    model_path = str(build_model(config.model, tmp_path))
    assert not isinstance(prepare_run(config, model_path).reward, RewardSpec)
    config = with_row_rewards(tmp_path, "f1", "deepscaler")  # needs a process
    assert isinstance(prepare_run(config, model_path).reward, RewardSpec)


def test_engines_of_a_judge_need_a_row_or_a_reward_that_asks_them(tmp_path: Path) -> None:
    engine = ["reward.engine.num_gpus=1", f"data.prompt_data={tmp_path}/prompts.jsonl"]
    with_row_rewards(tmp_path, "judge")
    config = load_config([*QUICKSTART, *engine])
    model_path = str(build_model(config.model, tmp_path))
    run = prepare_run(config, model_path)
    assert isinstance(run.reward, RewardSpec) and run.layout.num_reward_engines == 1
    with_row_rewards(tmp_path, "f1")
    with pytest.raises(
        ConfigError, match=r"^reward\.engine\.num_gpus must be 0 without a reward that asks the engines"
    ):
        prepare_run(config, model_path)


def test_keys_of_processes_are_ignored_only_if_no_row_needs_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_path = str(build_model(config_of(tmp_path).model, tmp_path))
    for row, ignored in (("f1", True), ("deepscaler", False)):
        caplog.clear()
        with_row_rewards(tmp_path, row)
        config = load_config([*QUICKSTART, f"data.prompt_data={tmp_path}/prompts.jsonl", "reward.max_workers=2"])
        prepare_run(config, model_path)
        assert ("reward.max_workers is ignored: this reward needs no process" in caplog.text) == ignored


def test_an_unknown_reward_of_a_row_is_found_before_the_start(tmp_path: Path) -> None:
    config = with_row_rewards(tmp_path, "f1", "mathematics")
    with pytest.raises(DataError, match=r"^row 2 of .*prompts\.jsonl must have one of .*, got 'mathematics'; correct"):
        prepare_run(config, str(build_model(config.model, tmp_path)))
