"""Checks of the device: driver and memory, torch, collectives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure, SkipCheck
from rlscale.engines.ports import free_port
from rlscale.plan.hardware import host_memory_bytes

GB = 1e9
MIN_HOST_GB, MIN_DISK_GB, MIN_SHARED_GB = 4.0, 2.0, 1.0
QUERY = "name,driver_version,memory.total,memory.used"
MAX_RANKS = 8

LIBRARIES = ("torch", "transformers", "ray", "hydra", "peft", "megatron.core")
MAX_IMPORT_S = 15.0
"""Every process of a run imports most of them: above this time for all together each start is slow."""


def machine(context: CheckContext) -> CheckResult:
    """Cores, memory, free space, and the GPUs that the driver reports; without torch."""
    shared = Path("/dev/shm")
    values = {
        "host memory": host_memory_bytes() / GB,
        "free disk": shutil.disk_usage(Path.cwd()).free / GB,
        "free /dev/shm": shutil.disk_usage(shared).free / GB if shared.is_dir() else 0.0,
    }
    figures = [Figure(name="cores", value=float(len(os.sched_getaffinity(0))))]
    figures += [Figure(name=name, value=value, unit="GB") for name, value in values.items()]
    low = [
        f"{name} {values[name]:.1f} GB, at least {least:g} GB are needed"
        for name, least in (("host memory", MIN_HOST_GB), ("free disk", MIN_DISK_GB), ("free /dev/shm", MIN_SHARED_GB))
        if values[name] < least
    ]
    summary = "a check of the CPU: no GPU is needed"
    if context.device == "cuda":
        gpus = _query_gpus()
        figures += [Figure(name=f"GPU {i}", value=text) for i, text in enumerate(gpus)]
        summary = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"
    if low:
        return CheckResult(
            verdict=CheckVerdict.warning,
            summary=f"{summary}; {'; '.join(low)}",
            figures=tuple(figures),
            next_step="free space; in a container give it more shared memory (docker run --shm-size=16g)",
        )
    return CheckResult(verdict=CheckVerdict.ok, summary=summary, figures=tuple(figures))


def imports(context: CheckContext) -> CheckResult:
    """Imports the libraries, and so also brings their files into memory for the checks that follow."""
    figures, missing = [], []
    began = time.perf_counter()
    for name in LIBRARIES:
        started = time.perf_counter()
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # the library is here, one that it needs is not
            missing.append(name)
            continue
        figures.append(Figure(name=name, value=time.perf_counter() - started, unit="s"))
    total = time.perf_counter() - began
    summary = f"{len(figures)} libraries in {total:.1f} s"
    if missing:
        summary += f"; not installed: {', '.join(missing)}"
    is_slow = total > MAX_IMPORT_S
    verdict = CheckVerdict.warning if is_slow else CheckVerdict.ok
    return CheckResult(verdict=verdict, summary=summary, figures=tuple(figures))


def _query_gpus() -> list[str]:
    """One line for each GPU, from nvidia-smi. Raises RuntimeError where the driver does not answer."""
    if shutil.which("nvidia-smi") is None:
        raise SkipCheck("there is no nvidia-smi; the check of torch shows whether it sees a GPU")
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"nvidia-smi must list a GPU, got exit code {done.returncode}: {done.stdout} {done.stderr}")
    return lines


def torch_build(context: CheckContext) -> CheckResult:
    """The build of torch, and the rates of its matrix products and copies."""
    # Imported here: `machine` must also work where torch is broken.
    import torch

    # Imported here: it imports torch.
    from rlscale.doctor.rates import measure_copy
    from rlscale.training.profiling.device_rate import MATMUL_SIZE, measure_matmul

    cuda = torch.version.cuda or "none"
    figures = [Figure(name="torch", value=torch.__version__), Figure(name="CUDA of the build", value=cuda)]
    if context.device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} (CUDA {cuda}) must see a GPU, got none")
        major, minor = torch.cuda.get_device_capability()
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        figures += [
            Figure(name="GPU", value=torch.cuda.get_device_name()),
            Figure(name="compute capability", value=f"{major}.{minor}"),
            Figure(name="NCCL", value=".".join(map(str, nccl))),
            Figure(name="free GPU memory", value=torch.cuda.mem_get_info()[0] / GB, unit="GB"),
        ]
        x = torch.randn(256, 256, device="cuda")
        torch.testing.assert_close((x @ x).cpu(), x.cpu() @ x.cpu(), atol=1e-2, rtol=1e-3)
    size = MATMUL_SIZE[context.device]
    for dtype in (torch.bfloat16, torch.float32):
        rate = measure_matmul(context.device, dtype) / 1e12
        name = str(dtype).removeprefix("torch.")
        figures.append(Figure(name=f"{name} matrix product of {size}^3", value=rate, unit="TFLOP/s"))
    figures.append(Figure(name="copy", value=measure_copy(context.device) / GB, unit="GB/s"))
    verdict, next_step = CheckVerdict.ok, ""
    if context.device == "cuda" and not torch.cuda.is_bf16_supported():
        verdict, next_step = CheckVerdict.warning, "set train.dtype=float32: this GPU has no bfloat16"
    summary = f"{figures[2].value}" if context.device == "cuda" else "matrix products and copies on the CPU"
    return CheckResult(verdict=verdict, summary=summary, figures=tuple(figures), next_step=next_step)


def collectives(context: CheckContext) -> CheckResult:
    """All-reduce and broadcast over one process per GPU (two processes on a CPU), with their rate."""
    # Imported here: `machine` must also work where torch is broken.
    import torch

    num_ranks = min(torch.cuda.device_count(), MAX_RANKS) if context.device == "cuda" else 2
    backend = "nccl" if context.device == "cuda" else "gloo"
    port, rates = free_port("127.0.0.1"), context.folder / "rates.txt"
    began = time.perf_counter()
    command = [sys.executable, "-P", "-m", "rlscale.doctor.collective_rank", context.device, str(num_ranks), str(port)]
    ranks = [subprocess.Popen([*command, str(rank), str(rates)]) for rank in range(num_ranks)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"every rank must end with exit code 0, got {codes}")
    joined, all_reduce, broadcast = map(float, rates.read_text(encoding="utf-8").split())
    figures = (
        Figure(name="ranks", value=float(num_ranks)),
        Figure(name="processes and group", value=joined, unit="s"),
        Figure(name="all-reduce", value=all_reduce / GB, unit="GB/s"),
        Figure(name="broadcast", value=broadcast / GB, unit="GB/s"),
        Figure(name="whole check", value=time.perf_counter() - began, unit="s"),
    )
    text = f"{backend}: sums over {num_ranks} rank{'s' if num_ranks > 1 else ''} are correct"
    if num_ranks == 1:
        text += "; one GPU: links between GPUs were not tested"
    return CheckResult(verdict=CheckVerdict.ok, summary=text, figures=figures)
