"""The process of the gateway: starts it, and starts it again at the same address when it dies.

Its sessions survive: their files are read again, and the secret of their keys stays.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.engines.ports import reserve_port
from rlscale.engines.process import EngineProcess
from rlscale.gateway.admin_handlers import engines_to_json
from rlscale.gateway.serve_gateway import ADMIN_KEY_VARIABLE, ENGINE_KEY_VARIABLE, SECRET_VARIABLE
from rlscale.gateway.session_keys import MIN_SECRET_BYTES
from rlscale.hosts import LOOPBACK, is_loopback, join_host_port
from rlscale.types import EngineAddress

log = logging.getLogger(__name__)

NAME = "gateway"
MODULE = "rlscale.gateway.serve_gateway"
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayLaunch:
    """Settings of a gateway on this machine.

    Attributes:
        folder: of the sessions' files.
        log_folder: of its arguments and its log.
        codec: factory of the renderer, see `serve_gateway.load_codec`.
        port: None: a free one.
    """

    folder: Path
    log_folder: Path
    model: str
    codec: Mapping[str, Any]
    host: str = LOOPBACK
    port: int | None = None
    timeout_s: float = 3600.0
    admin_key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_hex(MIN_SECRET_BYTES), repr=False)


class GatewayProcess:
    """A gateway that can be restarted.

    Example:
        gateway = GatewayProcess(launch, engines)
        gateway.start()
        client = GatewayClient(gateway.address)
        ...
        gateway.stop()
    """

    def __init__(
        self, launch: GatewayLaunch, engines: Sequence[EngineAddress], *, router: EngineAddress | None = None
    ) -> None:
        assert is_loopback(launch.host) or launch.admin_key, "a gateway beyond loopback needs a key"
        self.launch, self.engines, self.router = launch, list(engines), router
        # Kept for restarts: agents have the address.
        port = launch.port or reserve_port(launch.host)
        url = f"http://{join_host_port(launch.host, port)}"
        self.address = EngineAddress(name=NAME, url=url, num_ranks=0, api_key=launch.admin_key)
        self._port = port
        self.is_paused = False  # how it starts the next time
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def set_engines(self, engines: Sequence[EngineAddress], *, router: EngineAddress | None = None) -> None:
        """Changes the addresses with which the gateway starts the next time; `GatewayClient` changes them now."""
        self.engines, self.router = list(engines), router

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the gateway and returns when it answers.

        Raises:
            EngineError: it ended, or did not answer in time.
        """
        self._process = self._new_process()
        self._process.start()
        self._process.wait_ready(timeout_s)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts a dead gateway again."""
        self.stop()
        self.start(timeout_s)

    def poll(self) -> str | None:
        """The reason why the gateway has ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._process = None

    def _new_process(self) -> EngineProcess:
        launch = self.launch
        launch.log_folder.mkdir(parents=True, exist_ok=True)
        file = launch.log_folder / "gateway_arguments.json"
        arguments = {
            "folder": str(launch.folder.absolute()),
            "model": launch.model,
            "host": launch.host,
            "port": self._port,
            "timeout_s": launch.timeout_s,
            "is_paused": self.is_paused,
            "codec": dict(launch.codec),
        }
        file.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
        # The environment of the gateway alone: agents may be children of the driver.
        env = {
            **os.environ,
            ADMIN_KEY_VARIABLE: launch.admin_key,
            SECRET_VARIABLE: launch.secret,
            ENGINE_KEY_VARIABLE: json.dumps(engines_to_json(self.engines, self.router)),
        }
        return EngineProcess(
            [sys.executable, "-m", MODULE, str(file.absolute())],
            name=NAME,
            url=self.address.url,
            env=env,
            log_path=launch.log_folder / "gateway_server.log",
        )
