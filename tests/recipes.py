"""Recipes of conf/experiment: those whose rehearsal runs, and those that wait for a feature."""

RUNNABLE = (
    "deepseek_r1",
    "glm4_9b_dapo",
    "nanochat_rl",
    "nanochat_sft",
    "quickstart",
    "quickstart_warmup",
    "qwen3_30b_a3b_gspo",
    "qwen3_4b_grpo",
    "qwen3_4b_ppo",
    "sft",
)

WAITING = {"glm45_355b_a32b": "train.backend"}
"""Recipe -> the key that this version does not support yet. Its rehearsal reports the key; it is never removed."""
