"""GRPOConfig of TRL as YAML, JSON and a command line, compared with values that were written by hand."""

from pathlib import Path
from typing import Any

import pytest

import rlscale
from rlscale.migration.findings import Kind
from rlscale.migration.migration_report import Migration
from tests.unit.migration.test_expectations import plain
from tests.unit.migration.test_migrate import kinds, values

YAML = """\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/DeepMath-103K
output_dir: out/grpo
run_name: grpo-small
learning_rate: 1.0e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_steps: 200
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_generations: 8
max_prompt_length: 512
max_completion_length: 1024
temperature: 0.9
top_k: 0
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.3
use_peft: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
bf16: true
gradient_checkpointing: false
save_steps: 50
save_total_limit: 2
report_to: [wandb, tensorboard]
reward_funcs: [accuracy_reward]
seed: 7
generation_kwargs: {presence_penalty: 0.5}
chat_template_kwargs:
  enable_thinking: false
"""
# 4 samples * 8 accumulations * 4 processes = 128 samples of a step and of a rollout: 16 prompts with 8 samples each.
YAML_VALUES: dict[str, Any] = {
    "model.hf_checkpoint": "Qwen/Qwen3-0.6B",
    "data.prompt_data": "data/trl-lib_DeepMath-103K.jsonl",
    "data.label_key": "solution",
    "data.num_rollout": 200,
    "data.apply_chat_template_kwargs.enable_thinking": False,
    "checkpoint.save": "out/grpo",
    "checkpoint.save_interval": 50,
    "checkpoint.keep_last": 2,
    "run.name": "grpo-small",
    "optim.lr": 1e-6,
    "optim.lr_decay_style": "cosine",
    "optim.warmup_ratio": 0.1,
    "optim.adam_beta2": 0.999,
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 128,
    "batch.rollout_batch_size": 16,
    "batch.n_samples_per_prompt": 8,
    "rollout.max_prompt_len": 512,
    "rollout.max_response_len": 1024,
    "rollout.temperature": 0.9,
    "rollout.top_k": -1,
    "rollout.sampling_params.presence_penalty": 0.5,
    "algo.use_kl_loss": True,
    "algo.kl_loss_coef": 0.04,
    "algo.eps_clip": 0.2,
    "algo.eps_clip_high": 0.28,
    "algo.divide_by_max_response_len": True,
    "algo.grpo_std_normalization": False,
    "algo.tis_type": "mis",
    "algo.tis_clip": 3.0,
    "cluster.colocate": True,
    "cluster.actor_num_gpus_per_node": 4,
    "sglang.mem_fraction_static": 0.3,
    "train.backend": "fsdp",
    "train.dtype": "bfloat16",
    "train.seed": 7,
    "train.lora.rank": 32,
    "train.lora.target_modules": ["q_proj", "v_proj"],
    "fsdp.gradient_checkpointing": False,
    "logging.wandb.enabled": True,
    "logging.tensorboard.enabled": True,
    "reward.type": "math",
}

# As `to_dict` of a GRPOConfig writes it: every argument has a value, most of them ask for nothing.
JSON = """\
{"output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8,
 "generation_batch_size": null, "num_generations": 4, "num_iterations": 2, "max_completion_length": 256,
 "learning_rate": 5e-6, "beta": 0.0, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
 "scale_rewards": "group", "mask_truncated_completions": true, "num_train_epochs": 1, "use_vllm": true,
 "vllm_mode": "server", "vllm_server_host": "10.0.0.2", "vllm_importance_sampling_correction": false,
 "report_to": "none", "save_strategy": "no", "save_steps": 500, "eval_strategy": "no", "eval_steps": 100,
 "hub_token": "hf_0123456789", "push_to_hub": false, "hub_strategy": "every_save", "hub_model_id": null,
 "top_p": 0.95, "repetition_penalty": 1.05, "warmup_steps": 10, "optim": "adamw_torch_fused", "adam_beta2": 0.95,
 "generation_kwargs": null, "model_init_kwargs": null, "use_adaptive_entropy": false, "entropy_coef_min": 0.0,
 "vespo_k_pos": 2.0, "fp16": false, "bf16": true, "sync_ref_model": false, "ref_model_sync_steps": 512}
"""
# 2 * 8 * 4 processes = 64 samples of a rollout, 2 * 4 * 4 = 32 of a step; 64 / 4 = 16 prompts.
JSON_VALUES: dict[str, Any] = {
    "checkpoint.save": "out",
    "batch.micro_batch_size": 2,
    "batch.rollout_batch_size": 16,
    "batch.global_batch_size": 32,
    "batch.n_samples_per_prompt": 4,
    "algo.ppo_epochs": 2,
    "algo.policy_loss": "gspo",
    "algo.eps_clip": 3e-4,
    "algo.calculate_per_token_loss": False,
    "algo.overlong_filter": True,
    "algo.use_tis": False,
    "algo.use_kl_loss": "not set",
    "data.num_epoch": 1,
    "cluster.colocate": False,
    "cluster.rollout_num_gpus": 1,
    "rollout.max_response_len": 256,
    "rollout.top_p": 0.95,
    "rollout.sampling_params.repetition_penalty": 1.05,
    "optim.lr": 5e-6,
    "optim.lr_warmup_iters": 10,
    "optim.adam_beta2": 0.95,
    "optim.name": "adam",
    "train.dtype": "bfloat16",
    "eval.interval": "not set",
    "checkpoint.save_interval": "not set",
}


def check_values(found: Migration, expected: dict[str, Any]) -> None:
    own = values(found)
    assert {path: plain(own.get(path, "not set")) for path in expected} == expected


@pytest.mark.slow
def test_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(YAML)
    found = rlscale.migrate(tmp_path / "grpo.yaml", set={"NUM_PROCESSES": "4"})
    check_values(found, YAML_VALUES)
    assert "override /model: qwen3_0_6b" in found.yaml
    assert not found.losses and not found.problems
    changed = {
        finding.subject: finding.place(found.root) for finding in found.findings() if finding.kind is Kind.changed
    }
    assert changed["max_steps 200"] == "grpo.yaml:8", "a line of the report has the line of the file"


@pytest.mark.slow
def test_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "grpo.json").write_text(JSON)
    found = rlscale.migrate(tmp_path / "grpo.json", set={"NUM_PROCESSES": "4"})
    check_values(found, JSON_VALUES)
    assert kinds(found, Kind.secret) == {"hub_token"} and "hf_0123456789" not in found.report() + found.yaml
    # Reward functions are code, which no file has.
    assert [finding.subject for finding in found.losses] == ["the reward functions"]
    assert kinds(found, Kind.dropped) >= {"save_steps", "eval_steps", "hub_strategy", "entropy_coef_min", "vespo_k_pos"}


def test_intervals_count_with_their_strategy(tmp_path: Path) -> None:
    text = JSON.replace('"save_strategy": "no"', '"save_strategy": "steps"')
    (tmp_path / "grpo.json").write_text(text.replace('"eval_strategy": "no"', '"eval_strategy": "steps"'))
    found = rlscale.migrate(tmp_path / "grpo.json", set={"NUM_PROCESSES": "4"})
    # A rollout has 64 / 32 = 2 steps in each of 2 iterations, so 100 steps are 25 rollouts.
    check_values(found, {"eval.interval": 25, "checkpoint.save_interval": 125})


def test_what_has_no_counterpart_is_lost(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "learning_rate: 1.0e-6\nnum_generations: 4\npush_to_hub: true\nhub_strategy: checkpoint\n"
        "loss_type: vespo\nvespo_k_pos: 3.0\nuse_adaptive_entropy: true\nentropy_target: 0.4\nmy_own: 1\n"
    )
    lost = kinds(rlscale.migrate(tmp_path / "grpo.yaml"), Kind.lost) - {"the"}
    assert lost == {
        "push_to_hub",
        "hub_strategy",
        "loss_type",
        "vespo_k_pos",
        "use_adaptive_entropy",
        "entropy_target",
        "my_own",
    }


@pytest.mark.parametrize(
    ("lines", "mode", "low"),
    [
        ("", "mask", 0.0),
        ("vllm_importance_sampling_clip_min: 0.5", "mask", 0.5),
        ("vllm_importance_sampling_mode: token_truncate", "truncate", "not set"),
        ("vllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_clip_min: 0.5", "clip", 0.5),
    ],
)
def test_weights_of_vllm_have_a_lower_bound_where_one_is_set(
    tmp_path: Path, lines: str, mode: str, low: float | str
) -> None:
    (tmp_path / "grpo.yaml").write_text(f"learning_rate: 1.0e-6\nnum_generations: 4\nuse_vllm: true\n{lines}\n")
    found = rlscale.migrate(tmp_path / "grpo.yaml")
    check_values(found, {"algo.mis.mode": mode, "algo.mis.low": low, "algo.tis_clip_low": "not set"})


@pytest.mark.parametrize(
    ("lines", "high"),
    [
        ("epsilon: 0.2\nepsilon_high: 5.0", 4.0),
        ("epsilon: 3.0\nepsilon_high: null", 2.0),
        ("epsilon: 0.2", "not set"),
    ],
)
def test_the_weight_of_cispo_is_bounded_from_above_only(tmp_path: Path, lines: str, high: float | str) -> None:
    (tmp_path / "grpo.yaml").write_text(f"learning_rate: 1.0e-6\nnum_generations: 4\nloss_type: cispo\n{lines}\n")
    found = rlscale.migrate(tmp_path / "grpo.yaml")
    expected = {"algo.policy_loss": "cispo", "algo.eps_clip": 1.0, "algo.calculate_per_token_loss": True}
    check_values(found, {**expected, "algo.eps_clip_high": high})
    assert ("epsilon" in kinds(found, Kind.lost)) == (high == "not set")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "accelerate launch --config_file zero3.yaml --num_processes 4 grpo.py --model_name_or_path Qwen/Qwen3-0.6B "
            "--learning_rate 1e-5 --num_generations 8 --beta 0.01 --bf16 --report_to wandb tensorboard --use_vllm",
            {
                "optim.lr": 1e-5,
                "algo.kl_loss_coef": 0.01,
                "algo.use_tis": True,
                "train.dtype": "bfloat16",
                "cluster.actor_num_gpus_per_node": 4,
                "batch.rollout_batch_size": 4,
                "batch.global_batch_size": 32,
                "logging.wandb.enabled": True,
                "logging.tensorboard.enabled": True,
            },
        ),
        (
            "accelerate launch --num_machines=2 --num_processes=16 grpo.py --learning_rate 1e-6",
            {"cluster.actor_num_nodes": 2, "cluster.actor_num_gpus_per_node": 8, "batch.rollout_batch_size": 16},
        ),
        (
            "torchrun --nproc-per-node=2 examples/grpo.py --num_generations 4 --max_completion_length 64",
            {"cluster.actor_num_gpus_per_node": 2, "batch.rollout_batch_size": 4, "rollout.max_response_len": 64},
        ),
        (
            "trl grpo --num_processes 2 --accelerate_config zero3 --per_device_train_batch_size 4 --temperature 0.7",
            {"cluster.actor_num_gpus_per_node": 2, "batch.global_batch_size": 8, "rollout.temperature": 0.7},
        ),
        (
            "--learning_rate 2e-6 --warmup_steps 0",
            {"optim.lr_warmup_iters": 0, "optim.warmup_ratio": 0.0},
        ),
        (
            "--learning_rate 2e-6 --warmup_steps 5 --warmup_ratio 0.1",
            {"optim.lr_warmup_iters": 5, "optim.warmup_ratio": 0.0},
        ),
        (
            "--learning_rate 2e-6 --warmup_ratio 0.1 --lr_scheduler_type constant",
            {"optim.lr_decay_style": "constant", "optim.warmup_ratio": 0.0},
        ),
        (
            "--learning_rate 2e-6 --warmup_ratio 0.1 --lr_scheduler_type constant_with_warmup",
            {"optim.lr_decay_style": "constant", "optim.warmup_ratio": 0.1},
        ),
        (
            "--learning_rate 2e-6 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {'min_lr':1E-7}",
            {"optim.min_lr": 1e-7},
        ),
        ("--learning_rate 2e-6", {"optim.lr": 2e-6, "train.backend": "fsdp", "batch.n_samples_per_prompt": 8}),
        ("learning_rate=2e-6 num_generations=4", {"optim.lr": 2e-6, "batch.n_samples_per_prompt": 4}),
    ],
)
def test_a_command_line(line: str, expected: dict[str, Any]) -> None:
    found = rlscale.migrate(line.split())
    assert str(found.project) == "trl"
    check_values(found, expected)
    assert kinds(found, Kind.lost) == {"the"}, "only the reward functions, which are code"


def test_a_command_overrides_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(YAML)
    (tmp_path / "run.sh").write_text("trl grpo --config configs/grpo.yaml --learning_rate 3e-6\n")
    found = rlscale.migrate(tmp_path / "run.sh", set={"NUM_PROCESSES": "4"})
    check_values(found, YAML_VALUES | {"optim.lr": 3e-6})
    assert kinds(found, Kind.repeated) == {"learning_rate"} and not found.losses


def test_checkpoints_are_as_frequent_as_in_trl() -> None:
    line = "--learning_rate 2e-6 --per_device_train_batch_size 8 --steps_per_generation 4"
    # A rollout has 4 optimiser steps.
    check_values(rlscale.migrate(line.split()), {"checkpoint.save_interval": 125})
    check_values(rlscale.migrate([*line.split(), "--save_strategy", "no"]), {"checkpoint.save_interval": "not set"})


def test_a_reward_function_of_the_training_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n\n\ndef reward_len(completions, **kwargs):\n    return [0.0]\n\n\n"
        "args = GRPOConfig(learning_rate=1e-6, num_generations=4)\n"
        "GRPOTrainer(model='Qwen/Qwen3-0.6B', reward_funcs=reward_len, args=args).train()\n"
    )
    found = rlscale.migrate(tmp_path / "train.py")
    check_values(found, {"reward.custom_path": "train:reward_len"})
    report = found.report()
    assert "rlscale calls (sample, judge); a function in the form of trl must be rewritten" in report
    assert "train.py: the script itself: importing train runs it; move the functions to a file" in report


def test_a_named_file_that_is_not_there_is_lost(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("trl grpo --config recipes/mine.yaml --learning_rate 3e-6\n")
    found = rlscale.migrate(tmp_path / "run.sh")
    (line,) = [finding.text for finding in found.losses if finding.subject.startswith("config")]
    assert line.startswith("recipes/mine.yaml is not next to the script; copy it there")


def test_numbers_that_are_not_finite_are_as_if_not_given() -> None:
    found = rlscale.migrate(["--learning_rate", "2e-6", "--max_steps", "inf", "--per_device_train_batch_size", "nan"])
    assert values(found)["batch.rollout_batch_size"] == 1


def test_a_group_without_samples_is_no_division_by_zero() -> None:
    found = rlscale.migrate(["--learning_rate", "2e-6", "--num_generations", "0"])
    assert values(found)["batch.rollout_batch_size"] == 8
