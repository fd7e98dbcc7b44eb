"""Arguments of SGLang servers: checking `sglang.python` starts an interpreter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import load_config
from rlscale.driver.engines import build_launch
from rlscale.engines.launch import EngineLaunch, ProcessPlace
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.engines.launch_sglang import SglangLaunch
from tests.unit.config.interpreters import fake_interpreter

PYTHON = Path()
PLACE = ProcessPlace(host="127.0.0.1", port=7)


@pytest.fixture(autouse=True, scope="module")
def _interpreter(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An interpreter that passes the checks of the configuration for SGLang."""
    global PYTHON
    PYTHON = fake_interpreter(tmp_path_factory.mktemp("interpreter"))


def launch_of(*overrides: str, device: str | None = None) -> EngineLaunch:
    launch = build_launch(load_config(overrides), model_path="/models/m", num_threads=3)
    launch = replace(launch, name="engine 1")
    return launch if device is None else replace(launch, device=device)


def arguments_of(*overrides: str, device: str | None = None) -> dict[str, Any]:
    launch = launch_of("rollout=sglang", f"sglang.python={PYTHON}", *overrides, device=device)
    assert isinstance(launch, SglangLaunch)
    return launch.arguments(PLACE)


def test_the_engine_of_the_config_is_launched() -> None:
    assert isinstance(launch_of(), EmbeddedLaunch)
    assert isinstance(launch_of("rollout=sglang", f"sglang.python={PYTHON}"), SglangLaunch)


def test_sglang_takes_its_arguments_from_a_file(tmp_path: Path) -> None:
    launch = replace(launch_of("rollout=sglang", f"sglang.python={PYTHON}"), api_key="secret")
    command = launch.command(PLACE, tmp_path / "logs")
    assert command[0] == str(PYTHON) and Path(command[1]).name == "serve.py" and Path(command[1]).is_file()
    written = (tmp_path / "logs" / "engine_1_arguments.json").read_text()
    assert command[2] == str(tmp_path / "logs" / "engine_1_arguments.json")
    assert json.loads(written)["model_path"] == "/models/m" and "secret" not in written
    assert "secret" in launch.environment(PLACE).values() and "secret" not in repr(launch)


def test_sglang_on_a_cpu() -> None:
    arguments = arguments_of(device="cpu")
    assert arguments["device"] == "cpu" and arguments["dtype"] == "float32"
    assert arguments["attention_backend"] == "torch_native" and arguments["sleep_on_idle"] is True
    assert arguments["mem_fraction_static"] == 0.3 and arguments["random_seed"] == 42 and arguments["tp_size"] == 1
    assert "context_length" not in arguments and "enable_memory_saver" not in arguments


def test_arguments_of_the_user_take_precedence_on_a_cpu() -> None:
    arguments = arguments_of("sglang.mem_fraction_static=0.6", "sglang.max_total_tokens=99", "sglang.page_size=null")
    assert arguments["mem_fraction_static"] == 0.6 and arguments["max_total_tokens"] == 99
    assert "page_size" not in arguments


def test_sglang_returns_routes_for_replay() -> None:
    overrides = ("train=megatron", "model=tiny_qwen3_moe", "model.tie_word_embeddings=false")
    assert arguments_of(*overrides, "algo.use_rollout_routing_replay=true")["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in arguments_of(*overrides)


IN_PLACE = ("rollout.max_staleness=1", "rollout.pause_mode=in_place")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (IN_PLACE, True),
        ((*IN_PLACE, "sglang.disable_radix_cache=false"), False),
        ((*IN_PLACE, "rollout.update_mode=boundary"), None),
        (("rollout.max_staleness=1",), None),
        (("rollout.pause_mode=in_place",), None),
    ],
)
def test_prefix_cache_is_off_if_updates_do_not_flush(overrides: tuple[str, ...], expected: bool | None) -> None:
    assert arguments_of(*overrides).get("disable_radix_cache") is expected


def test_cuda_graph_sizes_have_the_name_of_this_sglang() -> None:
    assert arguments_of("sglang.cuda_graph_bs=[1,8]")["cuda_graph_bs_decode"] == [1, 8]


def test_servers_listen_on_loopback_unless_they_have_a_key(tmp_path: Path) -> None:
    address, process = launch_of("rollout=sglang", f"sglang.python={PYTHON}").open(tmp_path)
    assert address.url.startswith("http://127.0.0.1:") and address.name == "engine 1" and address.num_ranks == 1
    assert process.log_path == tmp_path / "engine_1_server.log"
