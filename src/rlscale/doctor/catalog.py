"""The checks in the order in which they run, with their deadlines. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_TOTAL_S = 540.0
"""All deadlines together are less: the doctor ends within 9 minutes, whatever hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckContext:
    """Device and folders of a check.

    Example:
        CheckContext(device="cuda", folder=Path("/tmp/doctor/lora"), models=Path("/tmp/doctor/models"))
    """

    device: str  # "cpu" | "cuda"
    folder: Path  # empty, for this check alone; removed afterwards
    models: Path  # of the built models, shared by all checks: building one imports transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check: a function of a `CheckContext` that returns a `CheckResult`.

    It raises SkipCheck where it cannot run; any other exception is a failure.
    """

    name: str
    title: str
    target: str  # module:function
    deadline_s: float
    advice: str  # next step where the check itself gives none
    needs_cuda: bool = False
    on_disk: bool = False  # its folder is on a disk; others may be in shared memory


def _check(name: str, title: str, target: str, deadline_s: float, advice: str, **options: bool) -> Check:
    return Check(
        name=name,
        title=title,
        target=f"rlscale.doctor.{target}",
        deadline_s=deadline_s,
        advice=advice,
        **options,
    )


_GPU_TESTS = "run `bin/test gpu`, whose tests compare the parts of this path one by one, and report the last lines"
_OUT_OF_MEMORY = "free the GPU (`nvidia-smi` lists its processes) and run `rlscale-doctor --only"

CHECKS: tuple[Check, ...] = (
    _check(
        "machine",
        "Driver, memory and disk",
        "check_device:machine",
        8,
        "install the NVIDIA driver, or run with --device cpu",
    ),
    _check(
        "imports",
        "Imports of the libraries",
        "check_device:imports",
        30,
        "copy the environment to a local disk, and compile it once: python -m compileall -q -j 0 <its site-packages>",
    ),
    _check(
        "torch",
        "torch and the rate of matrix products",
        "check_device:torch_build",
        20,
        "install a build of torch for the driver's CUDA version: docs/how-to/choose-torch.md",
    ),
    _check(
        "collectives",
        "NCCL (gloo on a CPU)",
        "check_device:collectives",
        25,
        "run it again with NCCL_DEBUG=INFO; on one node NCCL_P2P_DISABLE=1 shows whether a link is at fault",
    ),
    _check("fsdp", "FSDP2 step compared with the CPU", "check_training:fsdp_step", 30, _GPU_TESTS),
    _check(
        "attention",
        "Flash attention over packed samples",
        "check_training:attention",
        25,
        "use fsdp.attn_implementation=eager until it works; every other kernel packs samples",
    ),
    _check("lora", "LoRA step", "check_training:lora", 20, "pip install 'rlscale[lora]'"),
    _check(
        "engine",
        "Embedded engine, its logprobs compared with the trainer's",
        "check_engines:embedded_engine",
        30,
        "start `rlscale-serve` with the same --device by hand and read its log",
    ),
    _check(
        "process_group",
        "Weights over a process group",
        "check_channels:process_group",
        20,
        "use train.weight_channel=disk until it works",
    ),
    _check(
        "shared_memory",
        "Weights over CUDA IPC (shared memory on a CPU)",
        "check_channels:shared_memory",
        20,
        "use train.weight_channel=process_group until it works",
    ),
    _check(
        "disk",
        "Weights over a folder",
        "check_channels:disk",
        20,
        "check space and rate of the disk",
        on_disk=True,
    ),
    _check(
        "delta",
        "Weights as deltas",
        "check_channels:delta",
        20,
        "use train.weight_channel=disk until it works",
        on_disk=True,
    ),
    _check(
        "memory_saver",
        "torch_memory_saver",
        "check_memory_saver:memory_saver",
        30,
        "use cluster.offload_train_mode=move, which needs no package",
        needs_cuda=True,
    ),
    _check(
        "megatron",
        "Megatron-core step compared with FSDP2",
        "check_megatron:megatron_step",
        30,
        "use train=fsdp, or install megatron-core and transformer-engine in the versions of docs/how-to/megatron.md",
    ),
    _check("mfu_small", "MFU of a step, small model", "check_speed:mfu_small", 10, _GPU_TESTS),
    _check(
        "mfu_0_6b",
        "MFU of a step, Qwen3 of 0.6B",
        "check_speed:mfu_0_6b",
        25,
        f"{_OUT_OF_MEMORY} mfu_0_6b` again",
        needs_cuda=True,
    ),
    _check(
        "mfu_1_7b",
        "MFU of a step, Qwen3 of 1.7B",
        "check_speed:mfu_1_7b",
        30,
        f"{_OUT_OF_MEMORY} mfu_1_7b` again",
        needs_cuda=True,
    ),
    _check(
        "mfu_4b",
        "MFU of a step, Qwen3 of 4B",
        "check_speed:mfu_4b",
        45,
        f"{_OUT_OF_MEMORY} mfu_4b` again",
        needs_cuda=True,
    ),
    _check(
        "sglang",
        "SGLang",
        "check_engines:sglang_engine",
        35,
        "start the server by hand: docs/how-to/sglang.md; rollout=embedded works without it",
        needs_cuda=True,
    ),
    _check("ray", "Ray", "check_run:ray_start", 15, "run `ray start --head` and `ray status` by hand"),
    _check(
        "quickstart",
        "Five rollouts of the quickstart",
        "check_run:quickstart",
        50,
        "run `rlscale-train +experiment=quickstart data.num_rollout=5` and read its log",
    ),
)


def select_checks(only: list[str], skip: list[str]) -> list[Check]:
    """The checks of a command line, in their order. Raises ValueError, naming the option, for unknown names."""
    names = [check.name for check in CHECKS]
    for option, given in (("--only", only), ("--skip", skip)):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"{option} must name checks ({', '.join(names)}), got {', '.join(unknown)}")
    chosen = [check for check in CHECKS if (not only or check.name in only) and check.name not in skip]
    if not chosen:
        raise ValueError("--only and --skip must leave at least one check, got none; run rlscale-doctor --list")
    return chosen
