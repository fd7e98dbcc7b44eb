"""Launches of SGLang engines for tests of their places, processes and ranks: on this machine, as a run plans them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlscale.engines.launch import RENDEZVOUS_PORTS, NodeReport
from rlscale.engines.launch_plan import plan_engine
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.engines.ports import reserve_port
from rlscale.engines.process import EngineProcess
from rlscale.plan.placement import Layout
from rlscale.types import EngineAddress
from tests.fake_sglang import install_fake_sglang
from tests.tiny_model import write_tiny_qwen3

HOST = "127.0.0.1"

Opened = tuple[EngineAddress, list[EngineProcess]]
"""An engine and its processes by node rank, not started yet."""


def build_launch(folder: Path, *, num_gpus: int = 4, device: str = "cuda", python: Path | None = None) -> SglangLaunch:
    """An engine with a tiny model.

    Args:
        python: interpreter of the servers. None: one whose SGLang is the fake one.
    """
    return SglangLaunch(
        name="engine",
        model_path=str(write_tiny_qwen3(folder / "model")),
        dtype="bfloat16" if device == "cuda" else "float32",
        device=device,
        max_context_len=None,
        num_threads=1,
        seed=0,
        python=python or install_fake_sglang(folder / "python"),
        num_gpus=num_gpus,
    )


def open_engine(launch: SglangLaunch, folder: Path, *, index: int = 0, gpus_per_node: int = 8) -> Opened:
    """Opens an engine whose nodes are all this machine.

    Args:
        folder: of its logs.
        index: number of the engine.
    """
    layout = Layout(
        num_trainers=0,
        num_engines=index + 1,
        gpus_per_engine=launch.num_gpus,
        colocate=False,
        gpus_per_node=gpus_per_node,
    )
    reports = [
        NodeReport(host=HOST, port=reserve_port(HOST), rendezvous_port=reserve_port(HOST, number=RENDEZVOUS_PORTS))
        for _ in layout.process_bundles(index)
    ]
    planned = plan_engine(launch, layout, index, reports)
    opened = [process.launch.open(folder, process.place) for process in planned]
    return opened[0][0], [process for _, process in opened]


@contextmanager
def running(engines: Sequence[Opened], *, timeout_s: float) -> Iterator[list[EngineAddress]]:
    """The addresses of engines that run inside, once all are healthy."""
    processes = [process for _, all_of_one in engines for process in all_of_one]
    try:
        for process in processes:
            process.start()
        for _, (head, *_) in engines:
            head.wait_ready(timeout_s)
        yield [address for address, _ in engines]
    finally:
        for process in processes:
            process.stop(grace_s=0)
