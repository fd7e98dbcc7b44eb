"""Runs the middleware router with the arguments of a JSON file: `python -m ...serve_router arguments.json`."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

from rlscale.config import RouterPolicy
from rlscale.config.user_functions import load_hook
from rlscale.engines.launch import API_KEY_VARIABLE
from rlscale.engines.middleware_router.forwarding import EngineCalls
from rlscale.engines.middleware_router.router_app import MiddlewareRouter
from rlscale.engines.middleware_router.worker_table import WorkerTable
from rlscale.engines.server.http_server import KEEPALIVE_S, raise_file_limit

FULL_COLLECTION_EVERY = 1000
"""Collections of the middle generation between two full ones. Python's default of 10 is for small heaps: a full one
visits every entry of a cache and frees nothing, since entries hold no reference cycles once they are removed.
"""

MIDDLEWARES_KEY = "router.middleware_paths"


def build_server(arguments: dict[str, Any], *, api_key: str | None) -> uvicorn.Server:
    """The server with its engines and middlewares, not started yet.

    Raises:
        ConfigError: a middleware cannot be imported.
    """
    table = WorkerTable(RouterPolicy(arguments["policy"]), failure_threshold=arguments["health_failure_threshold"])
    for url in arguments["worker_urls"]:
        table.add(url, api_key=api_key)
    calls = EngineCalls(
        table,
        timeout_s=arguments["request_timeout_s"],
        max_running=arguments["max_concurrent_requests"],
        check_interval_s=arguments["health_check_interval_s"],
    )
    router = MiddlewareRouter(calls, model_path=arguments["model_path"], max_staleness=arguments["max_staleness"])
    middlewares = [load_hook(MIDDLEWARES_KEY, path) for path in arguments["middleware_paths"]]
    config = uvicorn.Config(
        router.build_app(middlewares, api_key=api_key),
        host=arguments["host"],
        port=arguments["port"],
        log_level="warning",
        access_log=False,
        timeout_keep_alive=int(KEEPALIVE_S),  # a pooled connection of a client outlives a pause between two rollouts
        timeout_graceful_shutdown=1,
        lifespan="on",
    )
    return uvicorn.Server(config)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    arguments = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # The file is a readable record of the run; secrets are passed in the environment.
    api_key = os.environ.pop(API_KEY_VARIABLE, None)
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_EVERY)
    # Modules of the user are where the driver was started.
    os.chdir(arguments["working_folder"])
    raise_file_limit()  # each request has a connection to its client and one to an engine
    build_server(arguments, api_key=api_key).run()


if __name__ == "__main__":
    main()
