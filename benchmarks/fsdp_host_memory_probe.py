"""Anonymous memory of one trainer rank on FSDP2 while it loads, syncs and exports. Started by `fsdp_host_memory.py`.

    python fsdp_host_memory_probe.py '<arguments as JSON>' RANK

Anonymous memory is RssAnon of /proc/self/status, sampled every millisecond in a thread: it counts neither mapped files
nor the page cache. The sync is that of a run, with the bucket size of a run, to an engine in another process. It is the
last work of a rank before its first rollout.
"""

import ctypes
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlscale.config import (
    AlgoConfig,
    ComputeDtype,
    FsdpConfig,
    LoraConfig,
    OptimConfig,
    TrainConfig,
    WeightChannelName,
)
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import CriticSpec, ModelSource, TrainerSpec, WeightOwners
from rlscale.types import EngineAddress
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.sync import WeightSync

PERIOD_S = 0.001
TIMEOUT_S = 300.0
SENDS_FROM = {"all": WeightOwners.owners, "rank 0": WeightOwners.first}


class PeakSampler:
    """The largest anonymous memory of this process while a block runs.

    Example:
        with PeakSampler() as sampler:
            load()
        sampler.peak
    """

    def __init__(self) -> None:
        self.before = self.peak = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "PeakSampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    def _sample(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(PERIOD_S)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def make_spec(arguments: dict[str, Any]) -> TrainerSpec:
    roles, path = arguments["roles"], arguments["model"]
    algo: dict[str, Any] = {}
    if "reference" in roles:
        algo |= {"use_kl_loss": True, "kl_loss_coef": 0.1}
    if "teacher" in roles:
        algo |= {"opd_kl_coef": 0.1}
    if "critic" in roles:
        algo |= {"advantage_estimator": "ppo"}
    spec = TrainerSpec(
        model_path=path,
        train=TrainConfig(dtype=ComputeDtype[arguments["dtype"]], lora=LoraConfig(rank=arguments["lora_rank"])),
        fsdp=FsdpConfig(num_threads=1),
        optim=OptimConfig(lr=1e-6),
        algo=AlgoConfig(**algo),
        temperature=1.0,
        max_response_len=64,
        total_steps=1,
        device="cpu",
        ref_path=path if "reference" in roles else None,
        weight_owners=SENDS_FROM[arguments["sends"]],
    )
    other = ModelSource(path=arguments["small_model"])
    if "critic" in roles:
        spec = replace(spec, critic=CriticSpec(source=other, lr=1e-6))
    return replace(spec, teacher=other) if "teacher" in roles else spec


def kept_bytes(backend: FsdpBackend) -> int:
    """Bytes of all parameters that this rank keeps."""
    roles = (backend.policy, backend.reference, backend.critic, backend.teacher)
    parameters = [p.detach() for role in roles if role is not None for p in role.model.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def make_sync(backend: FsdpBackend, arguments: dict[str, Any], *, rank: int) -> WeightSync:
    """The weight sync of a run, connected to the engine of the benchmark."""
    spec = ChannelSpec(
        name=WeightChannelName(arguments["channel"]),
        backend="gloo",
        device="cpu",
        bucket_bytes=arguments["bucket_bytes"],
        timeout_s=TIMEOUT_S,
        folder=Path(arguments["folder"]) / "channel",
        model_folder=Path(arguments["model"]),
    )
    sync = make_channel(
        spec,
        make_engine=lambda address: HttpEngine(address, timeout_s=TIMEOUT_S),
        rank=rank,
        senders=backend.senders,
    )
    sync.connect([EngineAddress(name="engine 0", url=arguments["engine_url"])])
    return sync


def above(run: Callable[[], None]) -> int:
    """Peak of anonymous memory above that before the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with PeakSampler() as sampler:
        run()
    return sampler.peak - sampler.before


def main() -> None:
    arguments, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    num_ranks, folder = arguments["num_ranks"], Path(arguments["folder"])
    join_world(rank, num_ranks, "127.0.0.1", arguments["port"], "gloo", 600.0)
    started = time.perf_counter()
    with PeakSampler() as sampler:
        backend = FsdpBackend(make_spec(arguments), rank=rank, world_size=num_ranks)
    measured = {
        "seconds": time.perf_counter() - started,
        "start": sampler.before,
        "kept": kept_bytes(backend),
        "peak": sampler.peak,
        "loaded": anonymous_bytes(),
    }
    sync = make_sync(backend, arguments, rank=rank)
    with PeakSampler() as sampler:
        sync.push(backend.weights(), version=1)
    measured |= {"sync": sampler.peak - sampler.before, "sync_peak": sampler.peak}
    sync.close()
    if arguments["exports"]:
        measured["export"] = above(lambda: backend.export_hf(folder / "hf"))
    if arguments["saves"]:
        (folder / "checkpoint").mkdir(exist_ok=True)
        measured["save"] = above(lambda: backend.save(folder / "checkpoint"))
    torch.distributed.barrier()
    leave_world()
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
