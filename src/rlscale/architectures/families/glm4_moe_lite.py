"""GLM-4.7-Flash: DeepSeek-V3's layers under another `model_type`."""

from dataclasses import replace

from rlscale.architectures.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="glm4_moe_lite", sglang_unties=True)
