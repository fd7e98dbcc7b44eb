"""Recipes of conf/experiment."""

RUNNABLE = (
    "calculator",
    "calculator_warmup",
    "code",
    "code_warmup",
    "deepseek_r1",
    "framework_agent",
    "geo3k_vlm",
    "geo3k_vlm_multi_turn",
    "glm45_355b_a32b",
    "glm47_flash",
    "glm4_9b_dapo",
    "guess",
    "guess_warmup",
    "mimo_7b_mtp",
    "minimax_m25",
    "moonlight_16b_a3b",
    "nanochat_rl",
    "nanochat_sft",
    "quickstart",
    "quickstart_vision",
    "quickstart_vision_warmup",
    "quickstart_warmup",
    "qwen3_0_6b_gsm8k",
    "qwen3_30b_a3b_gspo",
    "qwen3_4b_grpo",
    "qwen3_4b_ppo",
    "search",
    "search_warmup",
    "sft",
    "two_agents",
    "two_agents_warmup",
)

AGENT_EXAMPLES = ("calculator", "code", "framework_agent", "guess", "search", "two_agents")
"""Recipes that `on=qwen3_4b` makes recipes for Qwen3-4B."""

CUT = ("deepseek_r1", "glm45_355b_a32b", "minimax_m25")
"""Recipes with more than 32 processes, whose layout a rehearsal cuts."""
