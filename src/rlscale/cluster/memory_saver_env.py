"""torch_memory_saver in the trainer's processes: its library must be there before the first byte of GPU memory is."""

from __future__ import annotations

from rlscale.config import OffloadMode
from rlscale.training.spec import TrainerSpec

SAVER = "torch_memory_saver"
LIBRARY = "torch_memory_saver_hook_mode_preload"


def saver_variables(spec: TrainerSpec) -> dict[str, str]:
    """Environment variables of a trainer rank that is to be paused; none for others.

    All its memory is the saver's from the start, with a copy on the host while it is paused.
    """
    if spec.offload is None or spec.offload.mode != OffloadMode.tms:
        return {}
    # Imported here: it is there, and of use, only where there are GPUs.
    from torch_memory_saver.utils import get_binary_path_from_package

    library = str(get_binary_path_from_package(LIBRARY))
    before = spec.train.env_vars.get("LD_PRELOAD")
    return {
        "LD_PRELOAD": library if before is None else f"{library}:{before}",
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }
