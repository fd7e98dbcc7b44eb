"""The gateway of a run: its address, its start, and the files of an earlier run."""

import asyncio
import threading
from pathlib import Path

from rlscale.config import RunConfig
from rlscale.driver.run_gateway import FOLDER, RunGateway, build_run_gateway
from rlscale.errors import EngineError, WorkerError
from rlscale.gateway.gateway_process import GatewayLaunch, GatewayProcess
from tests.unit.config.rules.valid_config import config_with


def refuse(failure: WorkerError) -> None:
    raise failure


def build(config: RunConfig, folder: Path, *, num_nodes: int = 1) -> RunGateway | None:
    return build_run_gateway(config, model_path="model", num_nodes=num_nodes, folder=folder, on_killed=refuse)


def test_a_run_has_a_gateway_if_it_needs_one(tmp_path: Path) -> None:
    assert build(config_with({}), tmp_path) is None
    found = build(config_with({"gateway.enabled": True}), tmp_path)
    assert found is not None and found.address.url.startswith("http://127.0.0.1:")
    assert found.address.api_key is not None and len(found.address.api_key) == 64
    assert found.address.api_key not in repr(found.address)


def test_host_and_port_are_those_of_the_config(tmp_path: Path) -> None:
    config = config_with({"gateway.enabled": True, "gateway.host": "10.0.0.7", "gateway.port": 31999})
    found = build(config, tmp_path, num_nodes=2)
    assert found is not None and found.address.url == "http://10.0.0.7:31999"


def test_sessions_of_a_driver_that_was_killed_are_deleted(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"{'0' * 32}.jsonl").write_text("{}")
    assert build(config_with({"gateway.enabled": True}), tmp_path) is not None
    assert not list((tmp_path / FOLDER).iterdir())


class SlowProcess(GatewayProcess):
    """A gateway whose first start takes until it is stopped."""

    def __init__(self, launch: GatewayLaunch) -> None:
        super().__init__(launch, ())
        self.num_running, self.is_first = 0, True
        self.started, self.stopped = threading.Event(), threading.Event()

    def start(self, timeout_s: float = 1.0) -> None:
        assert self.num_running == 0, "two processes cannot listen at one address"
        self.num_running += 1
        self.started.set()
        if self.is_first:
            self.is_first = False
            assert self.stopped.wait(30)
            raise EngineError("gateway ended")

    def stop(self) -> None:
        self.num_running = 0
        self.stopped.set()


async def test_an_attempt_that_ends_during_the_start_leaves_no_second_gateway(tmp_path: Path) -> None:
    gateway = build(config_with({"gateway.enabled": True}), tmp_path)
    assert gateway is not None
    process = gateway._process = SlowProcess(gateway._process.launch)
    first = asyncio.create_task(gateway.start([], router=None))
    assert await asyncio.to_thread(process.started.wait, 30)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await gateway.start([], router=None)
    assert process.num_running == 1
