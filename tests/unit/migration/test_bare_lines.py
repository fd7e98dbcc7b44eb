"""Bare command lines of slime and verl: each translation compared with values that were written by hand."""

import shlex
from typing import Any

import pytest

import rlscale
from rlscale.migration.findings import Kind
from tests.unit.migration.test_expectations import plain
from tests.unit.migration.test_migrate import kinds, values

SLIME = [
    (
        "--lr 1e-6 --hf-checkpoint Qwen/Qwen3-4B --rollout-batch-size 16 --n-samples-per-prompt 8 --eps-clip-high 0.28 "
        "--num-rollout 100 --rm-type math --label-key label --prompt-data p.jsonl --colocate",
        {
            "optim.lr": 1e-6,
            "batch.rollout_batch_size": 16,
            "batch.n_samples_per_prompt": 8,
            "algo.eps_clip_high": 0.28,
            "data.num_rollout": 100,
            "data.label_key": "label",
            "reward.type": "math",
            "cluster.colocate": True,
            # Megatron's defaults, which slime runs with.
            "optim.adam_beta2": 0.999,
            "optim.lr_decay_style": "linear",
        },
    ),
    # Values behind `=`, flags without a value, a list, and the word of a shell that starts the program.
    (
        "python3 train.py --lr=5e-7 --use-kl-loss --kl-loss-coef=0.001 --eval-prompt-data aime /d/aime.jsonl "
        "--tensor-model-parallel-size 2 --sglang-mem-fraction-static 0.7",
        {
            "optim.lr": 5e-7,
            "algo.use_kl_loss": True,
            "algo.kl_loss_coef": 0.001,
            "eval.prompt_data": ["aime", "/d/aime.jsonl"],
            "megatron.tensor_model_parallel_size": 2,
            "sglang.mem_fraction_static": 0.7,
        },
    ),
    (
        "ray job submit --address=http://127.0.0.1:8265 -- python3 train_async.py --lr 1e-6",
        {"rollout.max_staleness": 1},
    ),
    # A value that starts with a dash is no flag.
    ("--lr 1e-6 --rollout-top-k -1 --rollout-temperature 0.8", {"rollout.top_k": -1, "rollout.temperature": 0.8}),
    # More steps than samples are no reason for a traceback.
    ("--lr 1e-6 --num-steps-per-rollout 2", {"batch.num_steps_per_rollout": 2}),
]

VERL = [
    (
        "data.train_batch_size=8 actor_rollout_ref.actor.freeze_vision_tower=True",
        {"train.freeze_params": ["vision", "projector"]},
    ),
    # The name of a run is one part of a path.
    ("data.train_batch_size=8 trainer.experiment_name=math/qwen2//7b", {"run.name": "math-qwen2-7b"}),
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=4 "
        "+actor_rollout_ref.actor.ppo_mini_batch_size=64",
        {
            "batch.rollout_batch_size": 256,
            "batch.n_samples_per_prompt": 4,
            "batch.global_batch_size": 256,
            "optim.lr": 1e-6,
            "train.backend": "fsdp",
        },
    ),
    # The bounds of the clip range are 0.2 by default, and take precedence over clip_ratio.
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.clip_ratio_low=0.1",
        {"algo.eps_clip": 0.1, "algo.eps_clip_high": 0.2},
    ),
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.clip_ratio_low=0.1 "
        "actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio=0.3",
        {"algo.eps_clip": 0.1, "algo.eps_clip_high": 0.28},
    ),
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.clip_ratio_low=null actor_rollout_ref.actor.clip_ratio=0.3",
        {"algo.eps_clip": 0.3, "algo.eps_clip_high": "not set"},
    ),
    ("data.train_batch_size=256 actor_rollout_ref.actor.clip_ratio=0.3", {"algo.eps_clip": "not set"}),
    # The schedule advances once per rollout.
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=2 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        {"optim.lr_warmup_iters": 80, "optim.warmup_ratio": 0.0},
    ),
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.optim.lr_warmup_steps=-1",
        {"optim.lr_warmup_iters": "not set", "optim.warmup_ratio": 0.0},
    ),
    # The default of the penalty in the rewards is not that of the loss.
    (
        "data.train_batch_size=256 algorithm.use_kl_in_reward=True",
        {"algo.kl_coef": 0.001, "algo.kl_loss_type": "k1"},
    ),
    # With a temperature of 0 an evaluation is greedy.
    (
        "data.train_batch_size=256 actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        {"eval.temperature": 0.0},
    ),
    # A number that is none is reported.
    (
        "data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=inf "
        "actor_rollout_ref.actor.optim.betas=[a,b]",
        {"batch.global_batch_size": 256},
    ),
    # Without the type the normalisation would have no effect.
    (
        "data.train_batch_size=256 algorithm.rollout_correction.rollout_is=token "
        "algorithm.rollout_correction.rollout_is_batch_normalize=true",
        {"algo.use_tis": True, "algo.mis.normalize": True, "algo.tis_type": "mis", "algo.mis.mode": "not set"},
    ),
    (
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=gae "
        "'data.train_files=[/d/a.parquet,/d/b.parquet]' trainer.n_gpus_per_node=8 trainer.nnodes=2",
        {
            "train.backend": "megatron",
            "algo.advantage_estimator": "ppo",
            "data.prompt_files": ["/d/a.parquet", "/d/b.parquet"],
            "cluster.actor_num_gpus_per_node": 8,
            "cluster.actor_num_nodes": 2,
        },
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "line", "expected"),
    [*(("slime", *case) for case in SLIME), *(("verl", *case) for case in VERL)],
)
def test_a_bare_command_line(project: str, line: str, expected: dict[str, Any]) -> None:
    found = rlscale.migrate(shlex.split(line))
    own = values(found)
    assert str(found.project) == project
    assert {path: plain(own.get(path, "not set")) for path in expected} == expected
    assert kinds(found, Kind.lost) == set()


@pytest.mark.parametrize(("rank", "expected"), [("32", "not set"), ("0", "bridge")])
def test_adapters_are_trained_without_the_bridge_of_verl(rank: str, expected: str) -> None:
    line = (
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml "
        f"actor_rollout_ref.actor.megatron.use_mbridge=True actor_rollout_ref.model.lora.rank={rank}"
    )
    found = rlscale.migrate(shlex.split(line))
    assert plain(values(found).get("model.megatron_to_hf_mode", "not set")) == expected
    assert kinds(found, Kind.lost) == set()
