"""Launch of the middleware router in front of the engines of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.engines.sglang.router_process import RouterLaunch, RouterProcess
from rlscale.types import EngineAddress

MODULE = "rlscale.engines.middleware_router.serve_router"


@dataclass(frozen=True, kw_only=True, slots=True)
class MiddlewareRouterLaunch(RouterLaunch):
    """Settings of a middleware router.

    Attributes:
        model_path: folder or hub id whose tokenizer middlewares may load.
        max_staleness: weight versions that a cached answer may be behind the newest one.
        working_folder: where modules of the user are.
    """

    python: Path = Path(sys.executable)
    model_path: str
    max_staleness: int = 0
    working_folder: str = field(default_factory=os.getcwd)

    @property
    def process_class(self) -> type[RouterProcess]:
        return MiddlewareRouterProcess

    def arguments(self, host: str, port: int, workers: Sequence[str]) -> dict[str, Any]:
        """Arguments of the server, without the key."""
        config = self.config
        assert config.timeout_s is not None and config.max_connections is not None, "set by the resolve step"
        return {
            "worker_urls": list(workers),
            "host": host,
            "port": port,
            "policy": str(config.policy),
            "middleware_paths": list(config.middleware_paths),
            "request_timeout_s": config.timeout_s,
            "max_concurrent_requests": config.max_connections,
            "health_failure_threshold": config.health_check_failure_threshold,
            "health_check_interval_s": config.health_check_interval_s,
            "model_path": self.model_path,
            "max_staleness": self.max_staleness,
            "working_folder": self.working_folder,
        }

    def command(self, arguments: Path) -> list[str]:
        return [str(self.python), "-m", MODULE, str(arguments.absolute())]

    def inherited(self) -> dict[str, str]:
        return dict(os.environ)


class MiddlewareRouterProcess(RouterProcess):
    """The process of a middleware router."""

    def _add(self, new: EngineAddress, *, replaces: str) -> None:
        # In one call, so that the sessions of the old engine move to the new one and not in between to all others.
        self._post_worker({"url": new.url, "replaces": replaces})

    def _remove(self, worker_id: str) -> None:
        """No effect: `_add` has removed the old engine."""
