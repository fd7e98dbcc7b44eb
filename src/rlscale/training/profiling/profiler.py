"""Profiles of rollouts, and memory reports of ranks: on demand, and of ranks that run out of memory.

<profile_folder>/rollout_<id>_rank_<r>.json.gz   a trace for chrome://tracing or ui.perfetto.dev, allocations included
<profile_folder>/rollout_<id>_rank_<r>.txt       operators by self time
<memory_folder>/memory_rank_<r>.json             memory of the process and its tensors, largest first; on demand
                                                 memory_<time>_rank_<r>.json, see `observe/memory_request.py`
<memory_folder>/memory_rank_<r>.pickle           on CUDA: a snapshot for pytorch.org/memory_viz

Files of a critic on dedicated ranks end in critic_rank_<r>.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from rlscale.errors import WorkerError
from rlscale.observe.memory_request import MemoryWatcher, report_process, write_report
from rlscale.training.spec import ProfilerSpec

MAX_LINES = 100
"""Limit of the listed kinds of tensors, or operators."""


class RankProfiler:
    """Profiles one rank without changing any number that it computes.

    Example:
        profiler = RankProfiler(spec.profiler, rank=0)
        with profiler.report_oom(), profiler.profile_rollout(3):
            backend.train(batch, steps)
    """

    def __init__(self, spec: ProfilerSpec, *, rank: int, role: str = "actor") -> None:
        self._spec, self._worker = spec, f"{role} rank {rank}"
        self._suffix = f"rank_{rank}" if role == "actor" else f"{role}_rank_{rank}"
        if torch.cuda.is_available():
            # Current allocations only: a snapshot then shows the lines of code that hold memory.
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
        self._watcher = None if spec.request_file is None else MemoryWatcher(spec.request_file, self.write_memory)

    def close(self) -> None:
        """Ends the reports on demand."""
        if self._watcher is not None:
            self._watcher.stop()

    @contextmanager
    def profile_rollout(self, rollout_id: int) -> Iterator[None]:
        """Records a profile of the block, for the configured rollouts."""
        if rollout_id not in self._spec.profile_rollouts:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            yield
        folder, name = self._spec.profile_folder, f"rollout_{rollout_id}_{self._suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        own_time = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=own_time, row_limit=MAX_LINES)
        (folder / f"{name}.txt").write_text(table, encoding="utf-8")

    @contextmanager
    def report_oom(self) -> Iterator[None]:
        """Writes a memory report when the block runs out of memory.

        Raises:
            WorkerError: out of memory; names the report.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            failed_at_s, path = time.time(), self.write_memory()
            cause = f"{type(error).__name__}: {error}\nThe tensors in memory are listed in {path}"
            raise WorkerError(self._worker, cause, failed_at_s=failed_at_s) from error

    def write_memory(self, stamp: str = "") -> Path:
        """Writes a report now and returns its path; `stamp` is a part of the name."""
        folder, name = self._spec.memory_folder, "_".join(filter(None, ("memory", stamp, self._suffix)))
        path = folder / f"{name}.json"
        write_report(path, build_memory_report())
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))  # type: ignore[no-untyped-call]
        return path


def build_memory_report() -> dict[str, Any]:
    """Memory of this process, in bytes.

    `tensors` groups the tensors of Python by device, type and shape, largest sum first. Tensors that only the autograd
    graph holds are missing. Views of one storage count once.
    """
    kinds: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    seen: set[tuple[torch.device, int]] = set()
    for tensor in _live_tensors():
        storage = tensor.untyped_storage()
        # Views share the storage of their base, which counts once.
        if (tensor.device, storage.data_ptr()) in seen:
            continue
        seen.add((tensor.device, storage.data_ptr()))
        kind = (str(tensor.device), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        kinds[kind] += 1
        sizes[kind] += storage.nbytes()
    report = {
        **report_process(),
        "tensor_bytes": sizes.total(),
        "tensors": [
            {"bytes": size, "number": kinds[kind], "device": kind[0], "dtype": kind[1], "shape": list(kind[2])}
            for kind, size in sizes.most_common(MAX_LINES)
        ],
    }
    if torch.cuda.is_available():
        report["cuda"] = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }
    return report


def _live_tensors() -> Iterator[Tensor]:
    for each in gc.get_objects():
        # Not isinstance: it would read `__class__`, which lazy modules and proxies compute.
        if issubclass(type(each), Tensor):
            tensor = each.to_local() if isinstance(each, DTensor) else each
            if tensor.layout == torch.strided and tensor.device.type != "meta":
                yield tensor


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
