"""Hardware that a plan can be made for, by the data sheets of its makers (dense rates, without sparsity)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from rlscale.config import ComputeDtype

DTYPE_BYTES: Mapping[ComputeDtype, int] = MappingProxyType({ComputeDtype.bfloat16: 2, ComputeDtype.float32: 4})


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator and its links. Bandwidths are per direction."""

    name: str
    title: str
    memory_bytes: float
    flops: Mapping[ComputeDtype, float]  # per second
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second, to accelerators of the same node
    network_bandwidth: float  # bytes per second, to other nodes
    reserve_bytes: float = 0.0  # runtime, communication buffers, fragmentation of the allocator


def _gpu(
    name: str, title: str, *, memory_gib: float, tflops: tuple[float, float], gb_s: tuple[float, float, float]
) -> Hardware:
    """A GPU; `tflops` in bfloat16 and float32, `gb_s` of memory, link and network. GB in a data sheet means GiB."""
    return Hardware(
        name=name,
        title=title,
        memory_bytes=memory_gib * 2**30,
        flops={ComputeDtype.bfloat16: tflops[0] * 1e12, ComputeDtype.float32: tflops[1] * 1e12},
        memory_bandwidth=gb_s[0] * 1e9,
        link_bandwidth=gb_s[1] * 1e9,
        network_bandwidth=gb_s[2] * 1e9,
        reserve_bytes=3e9,
    )


# A rank or engine on a CPU has a core or two and shares the memory. The rates are measured with torch on two cores of
# an AMD EPYC (Zen 5): a matrix product of torch stays far below the rates in data sheets of CPUs.
_CPU = Hardware(
    name="cpu",
    title="two cores of an AMD EPYC (Zen 5), measured",
    memory_bytes=0.0,
    flops={ComputeDtype.bfloat16: 1.7e12, ComputeDtype.float32: 0.34e12},
    memory_bandwidth=24e9,
    link_bandwidth=12e9,
    network_bandwidth=1.25e9,
    reserve_bytes=0.5e9,
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "h100": _gpu("h100", "NVIDIA H100 SXM 80 GB", memory_gib=80, tflops=(989, 67), gb_s=(3350, 450, 50)),
        "h200": _gpu("h200", "NVIDIA H200 SXM 141 GB", memory_gib=141, tflops=(989, 67), gb_s=(4800, 450, 50)),
        "b200": _gpu("b200", "NVIDIA B200 180 GB", memory_gib=180, tflops=(2250, 75), gb_s=(7700, 900, 50)),
        "a100": _gpu("a100", "NVIDIA A100 SXM 80 GB", memory_gib=80, tflops=(312, 19.5), gb_s=(2039, 300, 25)),
        "cpu": _CPU,
    }
)


def find_hardware(name: str) -> Hardware:
    """The hardware of a name. For `cpu` the memory is that of this machine."""
    found = HARDWARE[name]
    return replace(found, memory_bytes=host_memory_bytes()) if name == "cpu" else found


def host_memory_bytes() -> float:
    """Bytes of memory of this machine, or of its container if that has a limit."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return min(total, float(text)) if text.isdigit() else total
