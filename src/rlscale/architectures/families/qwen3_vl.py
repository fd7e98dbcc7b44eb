"""Qwen3-VL: the decoder of Qwen3 with a vision tower, whose deepstack features are added after the first layers too."""

from rlscale.architectures.families.qwen3 import NAMES
from rlscale.architectures.family import Family
from rlscale.architectures.vision import VisionFamily

FAMILY = Family(
    name="qwen3_vl",
    implied={"use_qk_norm": True},
    vision=VisionFamily(interleaved_rotary=True, checkpoint_prefixes=("model.visual.", "model.language_model.")),
    hf_names=NAMES.moved("model.language_model."),
    embedded=True,
    chunked_logits=True,
)
