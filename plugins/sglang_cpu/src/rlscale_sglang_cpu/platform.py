"""The platform: SGLang's CPU device operations, and its plain torch code for everything else."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from rlscale_sglang_cpu.memory import use_plain_memory
from rlscale_sglang_cpu.seeds import ATTENTION_BACKEND, allow_deterministic_mode, use_seeded_sampling


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Serves without `sgl_kernel`, whose CPU build is not available as a wheel.

    It must be an out-of-tree platform: the CPU platform of SGLang calls those kernels.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        allow_deterministic_mode()

    def init_backend(self) -> None:
        from rlscale_sglang_cpu.attention_backend import use_batched_attention  # imports models, which need a platform

        use_batched_attention()
        use_seeded_sampling()
        use_plain_memory()

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
