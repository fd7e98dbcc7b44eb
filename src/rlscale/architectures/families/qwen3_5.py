"""Qwen3.5 as published, with a vision tower, of which only the decoder is trained."""

from rlscale.architectures.families.qwen3_5_text import NAMES
from rlscale.architectures.family import Family

FAMILY = Family(
    name="qwen3_5",
    implied={"use_qk_norm": True},
    delta_net=True,
    hf_names=NAMES.moved("model.language_model."),
)
