"""What SGLang's entry point group `sglang.srt.platforms` calls."""

import torch

PLATFORM = "rlscale_sglang_cpu.platform:CpuPlatform"


def activate() -> str | None:
    """The platform class; None where CUDA is, so that SGLang's own platform serves there."""
    return None if torch.cuda.is_available() else PLATFORM
