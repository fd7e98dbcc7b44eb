"""The gateway of a run: a process next to the driver, which is restarted when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlscale.architectures.hf_config import read_hf_fields
from rlscale.cluster.node_network import node_address
from rlscale.config import RunConfig
from rlscale.config.rules import needs_gateway
from rlscale.errors import EngineError, WorkerError
from rlscale.gateway.gateway_client import GatewayClient
from rlscale.gateway.gateway_process import NAME, GatewayLaunch, GatewayProcess
from rlscale.gateway.session_log import find_logs
from rlscale.hosts import LOOPBACK
from rlscale.types import EngineAddress

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
MODEL_NAME = "policy"
FOLDER = "gateway"
"""Name of the folder with the sessions' files, in the run folder."""


class RunGateway:
    """Starts, restarts and ends the gateway. It ends with the driver, too.

    Args:
        client: of the gateway; its calls wait for a restart.
        on_killed: called whenever the gateway has died; raises when it must not be started again.
    """

    def __init__(
        self, config: RunConfig, *, model_path: str, host: str, folder: Path, on_killed: Callable[[WorkerError], None]
    ) -> None:
        launch = GatewayLaunch(
            folder=folder / FOLDER,
            log_folder=folder / "logs",
            model=MODEL_NAME,
            codec={
                "factory": "rlscale.gateway.load_codec:load_codec",
                "arguments": {"model_path": model_path, "reads_images": config.data.multimodal_keys is not None},
            },
            host=host,
            port=config.gateway.port,
            timeout_s=config.rollout.timeout_s,
        )
        for file in find_logs(launch.folder):
            file.delete()  # of a driver that was killed: no agent has a key that is still valid
        self._process, self._on_killed = GatewayProcess(launch, ()), on_killed
        self._is_started, self._sending = False, asyncio.Lock()
        positions = read_hf_fields(model_path).get("max_position_embeddings")
        self.client = GatewayClient(
            self._process.address, max_context_len=positions if isinstance(positions, int) else None
        )

    @property
    def address(self) -> EngineAddress:
        return self._process.address

    async def start(self, engines: Sequence[EngineAddress], *, router: EngineAddress | None) -> None:
        """Starts the gateway, or gives one that runs the addresses of this attempt.

        Raises:
            WorkerError: it ended, or did not answer in time.
        """
        # First: a gateway that dies now starts again with the new addresses.
        self._process.set_engines(engines, router=router)
        try:
            if self._is_started:
                await self._send_engines()
            else:
                # An attempt that ended may have left one that was starting.
                await asyncio.to_thread(self._process.restart)
        except EngineError as error:
            raise WorkerError(NAME, str(error), failed_at_s=time.time()) from error
        self._is_started = True

    async def replace_engines(self, engines: Sequence[EngineAddress], *, router: EngineAddress | None) -> None:
        """Passes on the addresses of the engines that may get requests; without any, requests wait."""
        self._process.set_engines(engines, router=router)
        if not self._is_started:
            return
        try:
            await self._send_engines()
        except EngineError as error:
            # A gateway that died starts again with these addresses.
            log.warning("the gateway does not know the new engines: %s", error)

    async def _send_engines(self) -> None:
        # One call at a time, each with the newest addresses: one that comes late must not bring back a dead engine.
        async with self._sending:
            await self.client.set_engines(self._process.engines, router=self._process.router)

    async def watch(self) -> None:
        """Restarts a dead gateway, until cancelled. Raises WorkerError at the limit of restarts."""
        while True:
            cause = self._process.poll()
            if cause is not None:
                self._on_killed(WorkerError(NAME, cause, died=True))
                # Else requests would reach engines within an update.
                self._process.is_paused = self.client.is_paused
                # In a thread: it waits until the gateway answers.
                await asyncio.to_thread(self._process.restart)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        self._process.stop()


def build_run_gateway(
    config: RunConfig, *, model_path: str, num_nodes: int, folder: Path, on_killed: Callable[[WorkerError], None]
) -> RunGateway | None:
    """The gateway of a run, not yet started; None: the run needs none.

    Args:
        folder: of the run.
    """
    if not needs_gateway(config):
        return None
    # Agents run on any node of the cluster.
    host = config.gateway.host or (LOOPBACK if num_nodes == 1 else node_address())
    return RunGateway(config, model_path=model_path, host=host, folder=folder, on_killed=on_killed)
