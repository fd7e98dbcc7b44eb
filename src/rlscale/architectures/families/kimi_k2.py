"""Kimi-K2: DeepSeek-V3's layers under another `model_type`."""

from dataclasses import replace

from rlscale.architectures.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2", transformers_name="deepseek_v3")
