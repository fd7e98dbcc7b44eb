"""Qwen3.5 as published, with a vision tower, of which only the decoder is trained."""

from dataclasses import replace

from rlscale.architectures.families import qwen3_5_text

FAMILY = replace(qwen3_5_text.FAMILY, name="qwen3_5", hf_names=qwen3_5_text.NAMES.moved("model.language_model."))
