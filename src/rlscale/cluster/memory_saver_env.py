"""Environment of torch_memory_saver in a trainer's process: it must be loaded before GPU memory is allocated."""

from __future__ import annotations

from rlscale.config import OffloadMode
from rlscale.training.spec import TrainerSpec

SAVER = "torch_memory_saver"
LIBRARY = "torch_memory_saver_hook_mode_preload"


def saver_variables(spec: TrainerSpec) -> dict[str, str]:
    """Environment variables of a trainer rank that pauses its memory; empty for other ranks.

    The saver manages all memory of the process, and copies it to the host while it is paused.
    """
    if spec.offload is None or spec.offload.mode != OffloadMode.tms:
        return {}
    # Imported here: the package is installed only where there are GPUs.
    from torch_memory_saver.utils import get_binary_path_from_package

    library = str(get_binary_path_from_package(LIBRARY))
    before = spec.train.env_vars.get("LD_PRELOAD")
    return {
        "LD_PRELOAD": library if before is None else f"{library}:{before}",
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }
