"""A sweep of two jobs on one engine, without trainers: the first job is killed, the second one ends.

python -m tests.integration.shared_engine_jobs <folder>           the sweep, which prints what it saw
python -m tests.integration.shared_engine_jobs <folder> <job>     a job: prints its address, ends with its input
"""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from rlscale.algo.checksum import checksum
from rlscale.cluster.attach import attach
from rlscale.cluster.cluster_address import cluster_address
from rlscale.cluster.shared_engines import SharedEngines, SharedSpec, engine_host
from rlscale.config import ClusterConfig, Device
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.errors import EngineError
from rlscale.plan.placement import Layout
from rlscale.types import EngineAddress
from rlscale.weight_types import AdapterUpdate
from tests.tiny_model import write_tiny_qwen3

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
LIMIT_S = 120.0


def run_sweep(folder: Path) -> None:
    write_tiny_qwen3(folder / "model")
    connect()
    with engine_host(max_adapters=2):
        command = [sys.executable, "-m", __spec__.name, str(folder)]
        jobs = [
            subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for name in "ab"
        ]
        addresses = [EngineAddress(**json.loads(read_line(job))) for job in jobs]
        seen: dict[str, Any] = {
            "urls": [address.url for address in addresses],
            "adapters": [address.adapter for address in addresses],
            "loaded": loaded(addresses[1]),
        }
        jobs[0].kill()
        wait_until(lambda: len(loaded(addresses[1])) == 1)
        seen["after_kill"] = loaded(addresses[1])
        assert jobs[1].stdin is not None
        jobs[1].stdin.close()
        assert jobs[1].wait(LIMIT_S) == 0
        wait_until(lambda: not is_up(addresses[1]))
        seen["ends"] = "engine gone"
    print(json.dumps(seen))


def run_job(folder: Path, name: str) -> None:
    connect()
    launch = EmbeddedLaunch(
        name="engine",
        model_path=str(folder / "model"),
        dtype="float32",
        device="cpu",
        max_context_len=64,
        num_threads=1,
        seed=0,
        num_slots=4,
        deterministic=True,
    )
    spec = SharedSpec(
        launch=launch,
        layout=Layout(num_trainers=0, num_engines=1, gpus_per_engine=1, colocate=False),
        cluster=ClusterConfig(device=Device.cpu),
        job=name,
        num_adapters=1,
        log_folder=folder / name,
    )
    engines = SharedEngines(spec, report=lambda line: None, on_killed=fail)
    (address,) = asyncio.run(engines.start())
    asyncio.run(load_adapter(address))
    print(json.dumps(asdict(address)), flush=True)
    sys.stdin.read()
    engines.kill()


def connect() -> None:
    cluster = cluster_address(os.environ["RAY_ADDRESS"])
    assert cluster is not None
    attach(cluster, {"log_to_driver": False})


def fail(error: Exception) -> None:
    raise error


async def load_adapter(address: EngineAddress) -> None:
    assert address.adapter is not None
    tensors = {f"{LAYER}.lora_A.weight": torch.ones(2, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 2)}
    update = AdapterUpdate(
        name=address.adapter,
        version="1",
        config={"r": 2, "lora_alpha": 4},
        payload=base64.b64encode(save(tensors)).decode(),
        checksums={name: checksum(tensor) for name, tensor in tensors.items()},
    )
    engine = HttpEngine(address, timeout_s=LIMIT_S)
    await engine.load_adapter(update)
    await engine.close()


def loaded(address: EngineAddress) -> list[str]:
    """The names of the adapters that the engine holds."""

    async def ask() -> list[str]:
        engine = HttpEngine(address, timeout_s=LIMIT_S)
        try:
            return list((await engine.info())["adapters"])
        finally:
            await engine.close()

    return asyncio.run(ask())


def is_up(address: EngineAddress) -> bool:
    try:
        loaded(address)
    except EngineError:
        return False
    return True


def read_line(job: "subprocess.Popen[str]") -> str:
    assert job.stdout is not None
    return job.stdout.readline()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_job(Path(sys.argv[1]), sys.argv[2])
    else:
        run_sweep(Path(sys.argv[1]))
