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

CUT = ("deepseek_r1",)
"""Recipes with more than 32 processes, whose layout a rehearsal cuts."""

WAITING = {"glm45_355b_a32b": "train.backend"}
"""Recipe -> the key that this version does not support yet. Its rehearsal reports the key; it is never removed."""
