"""Commands, environments and arguments of engine servers."""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.driver.engines import build_client, build_launch
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.engines.sglang.serve import redact_in_logs
from rlscale.types import EngineAddress


def launch_of(*overrides: str, device: str | None = None) -> EngineLaunch:
    launch = build_launch(load_config(overrides), model_path="/models/m", num_threads=3)
    launch = replace(launch, name="engine 1")
    return launch if device is None else replace(launch, device=device)


def test_embedded_command(tmp_path: Path) -> None:
    command = launch_of("rollout.max_context_len=64", "rollout.num_slots=5").command("127.0.0.1", 7, tmp_path)
    assert command[:3] == [sys.executable, "-m", "rlscale.cli.serve"]
    assert {"--model-path=/models/m", "--port=7", "--num-slots=5", "--max-context-len=64", "--num-threads=3"} <= set(
        command
    )


def test_the_key_is_redacted_in_the_logs_of_sglang(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        redact_in_logs("secret")
        logging.getLogger("sglang").warning("server_args={'api_key': '%s', 'port': %d}", "secret", 7)
        logging.getLogger("sglang").warning("100 % of {'api_key': 'secret'}")
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == ["server_args={'api_key': '<redacted>', 'port': 7}", "100 % of {'api_key': '<redacted>'}"]


def test_sglang_on_gpus() -> None:
    overrides = (
        "experiment=qwen3_4b_grpo",
        "rollout=sglang",
        "cluster.rollout_num_gpus_per_engine=4",
        "sglang.pp_size=2",
    )
    config = load_config([*overrides, "cluster=one_node_colocate", "rollout.max_context_len=20000"])
    launch = build_launch(config, model_path="Qwen/Qwen3-4B", num_threads=1)
    assert isinstance(launch, SglangLaunch) and launch.num_ranks == 4
    arguments = launch.arguments("127.0.0.1", 7)
    assert arguments["tp_size"] == 2 and arguments["pp_size"] == 2 and arguments["context_length"] == 20000
    assert arguments["enable_memory_saver"] is True and arguments["device"] == "cuda"
    assert "attention_backend" not in arguments and "mem_fraction_static" not in arguments
    apart = build_launch(load_config([*overrides, "cluster=one_node"]), model_path="m", num_threads=1)
    assert isinstance(apart, SglangLaunch) and "enable_memory_saver" not in apart.arguments("127.0.0.1", 7)


def test_another_interpreter_does_not_get_this_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("SOMETHING", "else")
    environment = launch_of("rollout=sglang").environment()
    assert "PYTHONPATH" not in environment and environment["SOMETHING"] == "else"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert launch_of().environment()["PYTHONPATH"] == "/mine"
    assert os.environ["PYTHONPATH"] == "/mine"


def test_only_sglang_limits_samples_in_flight() -> None:
    address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")
    limited = build_client(load_config(["rollout=sglang", "sglang.server_concurrency=9"]), address)
    assert limited.max_in_flight == 9
    assert build_client(load_config([]), address).max_in_flight is None
