"""Cases of the rules about `rollout.weight_precision`; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import GPUS_PER_ENGINE, QWEN3_NEXT_FOLDER, SGLANG, Values

KEY = "rollout.weight_precision"
FP8: Values = {KEY: "fp8"}
INT4: Values = {KEY: "int4"}
ON_GPUS: Values = {**SGLANG, "cluster.device": "cuda", "model.intermediate_size": 1024}
EXTERNAL: Values = {"rollout.engine": "external", "rollout.external_engine_addrs": ["127.0.0.1:30000"]}
NEXT: Values = {
    "model.build": None,
    "model.hf_checkpoint": QWEN3_NEXT_FOLDER,
    "model.intermediate_size": 64,
    "model.moe_intermediate_size": 32,
}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "weights_are_not_trained_in_int4",
        {"train.env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}},
        "train.env_vars.OPEN_TRAINING_INT4_FAKE_QAT_FLAG must be unset: training with INT4 weights is not supported, "
        "got 1; remove it",
        {"train.env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "0"}},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **INT4},
        f"{KEY} must be fp8 or null with rollout.engine=sglang: SGLang 0.5.23 repacks int4 weights when it starts, so "
        "a weight sync cannot replace them, got int4; set it to fp8",
        {**ON_GPUS, **FP8},
    ),
    (
        "engine_reads_low_precision",
        {**EXTERNAL, **INT4},
        f"{KEY} must be fp8 or null with rollout.engine=external",
        {**EXTERNAL, **FP8},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **FP8, "cluster.device": "cpu"},
        f"{KEY} must be null with rollout.engine=sglang and cluster.device=cpu, got fp8; choose rollout=embedded",
        {**INT4, "cluster.device": "cpu"},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **FP8, "debug.rollout_only": True},
        f"{KEY} must be null with rollout.engine=sglang and debug.rollout_only",
        {**FP8, "debug.rollout_only": True},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **FP8, "model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "gpt_oss"},
        f"{KEY} must be null with rollout.engine=sglang and model.model_type=gpt_oss: SGLang 0.5.23 does not load "
        "scales of its experts in fp8 blocks, got fp8; remove it",
        {**FP8, "model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "gpt_oss"},
    ),
    (
        "int4_groups_divide_the_inputs",
        {**INT4, **NEXT},
        f"{KEY} must be fp8 or null where config.json's shared_expert_intermediate_size=24 is no multiple of 32, the "
        "size of a group, got int4; set it to fp8",
        {**FP8, **NEXT},
    ),
    (
        "int4_groups_divide_the_inputs",
        {**INT4, "model.build": "tiny_deepseek_v3", "model.kv_lora_rank": 24},
        f"{KEY} must be fp8 or null where model.kv_lora_rank=24 is no multiple of 32, the size of a group, got int4",
        {**INT4, "model.build": "tiny_deepseek_v3"},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **FP8, GPUS_PER_ENGINE: 16},
        f"{KEY} must be null where model.intermediate_size=1024 is no multiple of 2048: blocks of 128 rows on each of "
        "16 ranks of an SGLang engine, got fp8",
        {**ON_GPUS, **FP8, GPUS_PER_ENGINE: 8},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **FP8, GPUS_PER_ENGINE: 16, "sglang.server_args": {"moe_a2a_backend": "none"}},
        f"{KEY} must be null where model.intermediate_size=1024 is no multiple of 2048",
        {**ON_GPUS, **FP8, GPUS_PER_ENGINE: 16, "sglang.server_args": {"moe_a2a_backend": "deepep"}},
    ),
    (
        "int4_groups_divide_the_inputs",
        {**INT4, "model.intermediate_size": 400},
        f"{KEY} must be fp8 or null where model.intermediate_size=400 is no multiple of 32, the size of a group",
        {**FP8, "model.intermediate_size": 400},
    ),
    (
        "engine_reads_low_precision",
        {**ON_GPUS, **FP8, "sglang.server_args": {"speculative_draft_model_path": "/draft"}},
        f"{KEY} must be null with sglang.speculative_draft_model_path: SGLang 0.5.23 expects it in fp8, "
        "too, got fp8; remove it",
        {**ON_GPUS, **FP8},
    ),
    (
        "true_on_policy_mode_excludes_low_precision",
        {**FP8, "train.true_on_policy_mode": True},
        f"{KEY} must be null with train.true_on_policy_mode, got fp8",
        FP8,
    ),
]
