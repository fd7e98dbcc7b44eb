"""Entry point of the group `sglang.srt.platforms`, which SGLang calls at import."""

import torch

PLATFORM = "rlscale_sglang_cpu.platform:CpuPlatform"


def activate() -> str | None:
    """The platform class; None if CUDA is available, so that SGLang uses its own platform."""
    return None if torch.cuda.is_available() else PLATFORM
