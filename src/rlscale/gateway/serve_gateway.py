"""Runs the gateway with the arguments of a JSON file: `python -m rlscale.gateway.serve_gateway arguments.json`.

The admin key and the secret come from the environment: the file is a readable record of the run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from rlscale.engines.server.http_server import KEEPALIVE_S, exclude_startup_objects, raise_file_limit
from rlscale.gateway.admin_handlers import parse_engines
from rlscale.gateway.codec import Codec
from rlscale.gateway.gateway_app import GatewaySettings, build_gateway_app

ADMIN_KEY_VARIABLE = "RLSCALE_GATEWAY_ADMIN_KEY"
SECRET_VARIABLE = "RLSCALE_GATEWAY_SECRET"
ENGINE_KEY_VARIABLE = "RLSCALE_GATEWAY_ENGINES"
"""Engines and router as JSON: their addresses have keys."""

BACKLOG = 4096  # a run may open all its sessions at once


def build_server(arguments: dict[str, Any], secrets: dict[str, str]) -> uvicorn.Server:
    """The server, not started yet."""
    engines, router = parse_engines(json.loads(secrets[ENGINE_KEY_VARIABLE]))
    settings = GatewaySettings(
        folder=Path(arguments["folder"]),
        model=arguments["model"],
        engines=engines,
        router=router,
        timeout_s=arguments["timeout_s"],
        is_paused=arguments["is_paused"],
        admin_key=secrets[ADMIN_KEY_VARIABLE],
        secret=bytes.fromhex(secrets[SECRET_VARIABLE]),
    )
    config = uvicorn.Config(
        build_gateway_app(settings, load_codec(arguments["codec"])),
        host=arguments["host"],
        port=arguments["port"],
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(KEEPALIVE_S),
        timeout_graceful_shutdown=1,
        lifespan="on",
    )
    return uvicorn.Server(config)


def load_codec(value: dict[str, Any]) -> Codec:
    """The renderer: `{"factory": "package.module:function", "arguments": {...}}`."""
    module, _, name = value["factory"].partition(":")
    codec: Codec = getattr(import_module(module), name)(**value["arguments"])
    return codec


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    arguments = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Removed from the environment, which other code may print.
    secrets = {name: os.environ.pop(name) for name in (ADMIN_KEY_VARIABLE, SECRET_VARIABLE, ENGINE_KEY_VARIABLE)}
    raise_file_limit()  # each session may have a connection to its agent and one to an engine
    server = build_server(arguments, secrets)
    exclude_startup_objects()
    server.run()


if __name__ == "__main__":
    main()
