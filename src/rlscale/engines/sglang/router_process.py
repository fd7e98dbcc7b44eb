"""Launch of sglang-router in front of several engines, and the replacement of its engines.

driver ── /generate ──> router ──> engine 0, engine 1, ...
   └───── weights, pauses, aborts ────────^    directly to each engine: the router does not forward them
"""

import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.config import RouterConfig
from rlscale.config.passthrough.sglang_python import foreign_environment
from rlscale.engines.launch import API_KEY_VARIABLE
from rlscale.engines.ports import reserve_port
from rlscale.engines.process import EngineProcess
from rlscale.engines.sglang.prefill_decode import (
    count_workers,
    policy_of,
    router_arguments,
    separate_addresses,
    worker_body,
)
from rlscale.hosts import LOOPBACK, join_host_port
from rlscale.types import EngineAddress

log = logging.getLogger(__name__)

NAME = "router"
ROUTE = Path(__file__).with_name("route.py")
CALL_TIMEOUT_S = 10.0
WORKER_START_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLaunch:
    """Settings of a router. Without an `api_key` it must listen on loopback only."""

    python: Path
    config: RouterConfig  # resolved
    api_key: str | None = field(default=None, repr=False)

    def arguments(self, host: str, port: int, workers: Sequence[str]) -> dict[str, Any]:
        """Arguments of `RouterArgs`, without the key."""
        config = self.config
        assert config.timeout_s is not None and config.max_connections is not None, "set by the resolve step"
        return {
            "worker_urls": list(workers),
            "host": host,
            "port": port,
            "policy": str(policy_of(config.policy, len(workers))),
            "request_timeout_secs": max(1, round(config.timeout_s)),
            "max_concurrent_requests": config.max_connections,
            "queue_size": 0,  # requests wait in the driver, in order
            # The driver decides about retries: a silent retry would draw an answer twice, and a circuit breaker would
            # refuse requests after failures that the driver has handled.
            "disable_retries": True,
            "disable_circuit_breaker": True,
            "health_failure_threshold": config.health_check_failure_threshold,
            "health_success_threshold": 1,
            "health_check_interval_secs": config.health_check_interval_s,
            "worker_startup_timeout_secs": WORKER_START_S,
            "worker_startup_check_interval": 1,
            "shutdown_grace_period_secs": 1,
            "prometheus_host": "127.0.0.1",
            "prometheus_port": reserve_port("127.0.0.1"),
            "log_level": "warn",
        }

    @property
    def process_class(self) -> "type[RouterProcess]":
        return RouterProcess

    def command(self, arguments: Path) -> list[str]:
        """The command line; its last part is the file with the arguments."""
        return [str(self.python), str(ROUTE), str(arguments)]

    def inherited(self) -> dict[str, str]:
        """The part of this process's environment that the router inherits."""
        return foreign_environment(os.environ)

    def open(
        self, log_folder: Path, workers: Sequence[EngineAddress], *, host: str = LOOPBACK
    ) -> tuple[EngineAddress, "RouterProcess"]:
        """Address and (not yet started) process of the router, on this machine, where it listens at `host`."""
        port = reserve_port(host)
        address = EngineAddress(
            name=NAME, url=f"http://{join_host_port(host, port)}", num_ranks=0, api_key=self.api_key
        )
        log_folder.mkdir(parents=True, exist_ok=True)
        file = log_folder / "router_arguments.json"
        arguments = self.arguments(host, port, [worker.url for worker in workers])
        if separate := separate_addresses(workers):
            arguments |= router_arguments(self.config, separate)
        file.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
        env = self.inherited()
        if self.api_key is not None:
            env[API_KEY_VARIABLE] = self.api_key
        return address, self.process_class(
            self.command(file),
            name=NAME,
            url=address.url,
            env=env,
            log_path=log_folder / "router_server.log",
            api_key=self.api_key,
        )


class RouterProcess(EngineProcess):
    """The process of a router; ready when all its engines accept requests."""

    num_workers = 0

    def start(self) -> None:
        self.num_workers = count_workers(json.loads(Path(self.command[-1]).read_text(encoding="utf-8")))
        super().start()

    def replace_worker(self, old: str, new: EngineAddress) -> None:
        """Replaces the engine at URL `old` by `new` without interrupting others; returns when it accepts requests.

        Raises EngineError when the router dies or does not accept `new`.
        """
        workers = self._workers()
        old_ids = [worker["id"] for worker in workers if worker["url"].rstrip("/") == old.rstrip("/")]
        # An earlier call that was interrupted may have added `new` already.
        if not any(worker["url"].rstrip("/") == new.url.rstrip("/") for worker in workers):
            self._add(new, replaces=old)
        for worker_id in old_ids:
            self._remove(worker_id)
        self.wait_ready(CALL_TIMEOUT_S * 3)

    def _add(self, new: EngineAddress, *, replaces: str) -> None:
        """Adds the engine `new`; `replaces` is removed by the caller."""
        self._post_worker(worker_body(new))

    def _remove(self, worker_id: str) -> None:
        self._call("DELETE", f"/workers/{worker_id}")

    def _post_worker(self, body: dict[str, Any]) -> None:
        if self._api_key is not None:
            body = {**body, "api_key": self._api_key}
        self._call("POST", "/workers", body)

    @property
    def num_healthy(self) -> int:
        """Number of engines that get requests now."""
        return sum(bool(worker["is_healthy"]) for worker in self._workers())

    def _is_healthy(self) -> bool:
        try:
            return self.num_healthy >= self.num_workers
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return workers

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        if self._api_key is not None:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        # Without the proxies of the environment: the router is on this machine or in this cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=CALL_TIMEOUT_S) as response:
            return json.loads(response.read() or b"null")
