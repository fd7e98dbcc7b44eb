"""Qwen2.5-VL: the decoder of Qwen2.5 with a vision tower, whose features replace placeholder tokens."""

from rlscale.architectures.families.qwen2 import NAMES
from rlscale.architectures.family import Family
from rlscale.architectures.vision import VisionFamily

FAMILY = Family(
    name="qwen2_5_vl",
    implied={"attention_bias": True, "use_qk_norm": False},
    vision=VisionFamily(interleaved_rotary=False, checkpoint_prefixes=("visual.", "model.")),
    hf_names=NAMES,
    embedded=True,
    chunked_logits=True,
)
