"""The launch of the middleware router: every key reaches it, and its server is built from the arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import load_config
from rlscale.config.load import load_config_with_notes
from rlscale.engines.client.http_connection import HttpConnection
from rlscale.engines.client.request_ids import routing_key
from rlscale.engines.middleware_router.middleware_launch import MODULE, MiddlewareRouterLaunch
from rlscale.engines.middleware_router.serve_router import build_server
from rlscale.errors import ConfigError
from rlscale.types import EngineAddress

WORKERS = [EngineAddress(name=f"engine {i}", url=f"http://127.0.0.1:{4000 + i}") for i in range(2)]
MIDDLEWARE = "tests.unit.engines.middleware_router.test_router_app:Second"


def launch_of(*overrides: str, api_key: str | None = None, **more: Any) -> MiddlewareRouterLaunch:
    config = load_config(["cluster.rollout_num_gpus=2", "router.use_middleware_router=true", *overrides])
    return MiddlewareRouterLaunch(config=config.router, model_path="/model", api_key=api_key, **more)


def test_every_key_reaches_the_router() -> None:
    overrides = ("router.policy=consistent_hashing", "router.timeout_s=7", "router.max_connections=9")
    more = ("router.health_check_failure_threshold=5", "router.health_check_interval_s=4")
    launch = launch_of(*overrides, *more, f"router.middleware_paths=[{MIDDLEWARE!r}]", max_staleness=3)
    assert launch.arguments("127.0.0.1", 80, ["http://a"]) == {
        "worker_urls": ["http://a"],
        "host": "127.0.0.1",
        "port": 80,
        "policy": "consistent_hashing",
        "middleware_paths": [MIDDLEWARE],
        "request_timeout_s": 7,
        "max_concurrent_requests": 9,
        "health_failure_threshold": 5,
        "health_check_interval_s": 4,
        "model_path": "/model",
        "max_staleness": 3,
        "working_folder": str(Path.cwd()),
    }


def test_the_router_of_rlscale_needs_no_sglang_and_is_derived() -> None:
    loaded = load_config_with_notes(["router.use_middleware_router=true"])
    assert loaded.config.router.enabled is True
    assert any("router.use_middleware_router is set" in str(each) for each in loaded.derived)
    assert load_config(["cluster.rollout_num_gpus=2"]).router.enabled is False
    # The embedded engine takes any number of requests; SGLang's are limited by the client, too.
    assert loaded.config.router.max_connections == 65_536
    limited = load_config(["rollout=sglang", "router.use_middleware_router=true", "cluster.rollout_num_gpus=2"])
    assert limited.router.max_connections == 1024


def test_a_key_is_in_no_file_and_on_no_command_line(tmp_path: Path) -> None:
    address, process = launch_of(api_key="secret").open(tmp_path, WORKERS)
    written = (tmp_path / "router_arguments.json").read_text()
    assert json.loads(written)["worker_urls"] == [worker.url for worker in WORKERS]
    assert "secret" not in written and not any("secret" in argument for argument in process.command)
    assert MODULE in process.command and address.api_key == "secret" and "secret" not in repr(address)
    assert address.url.startswith("http://127.0.0.1:")


def test_the_server_has_the_engines_and_limits_of_the_arguments() -> None:
    arguments = launch_of("router.timeout_s=7").arguments("127.0.0.1", 80, ["http://a", "http://b"])
    server = build_server(arguments, api_key="secret")
    assert (server.config.host, server.config.port, server.config.access_log) == ("127.0.0.1", 80, False)
    with pytest.raises(ConfigError, match=r"router\.middleware_paths must be importable, got no_such_module:A"):
        build_server({**arguments, "middleware_paths": ["no_such_module:A"]}, api_key=None)


@pytest.mark.parametrize(
    ("rid", "key"),
    [
        ("train-7", "train-7"),
        ("train-7-31", "train-7"),
        ("train-7-31-2", "train-7"),
        ("eval-held_out-7", "eval-held_out-7"),
        ("eval-held_out-7-31", "eval-held_out-7"),
        ("rollout-0-5", "rollout-0"),
        ("eval-\N{GREEK SMALL LETTER ALPHA}\n-7", "eval-%CE%B1%0A-7"),
        ("own", "own"),
    ],
)
def test_the_requests_of_a_group_have_one_key(rid: str, key: str) -> None:
    assert routing_key(rid) == key


async def test_calls_without_a_session_have_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    connection = HttpConnection(WORKERS[0], router=WORKERS[1], timeout_s=1)

    async def record(method: str, path: str, body: Any, **options: Any) -> Any:
        sent.append(options["headers"])

    monkeypatch.setattr(connection, "_send", record)
    await connection.call("POST", "/generate", {})
    await connection.call("POST", "/generate", {}, session="train-7")
    assert sent == [None, {"X-SMG-Routing-Key": "train-7"}]
