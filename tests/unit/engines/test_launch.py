"""Commands, environments and arguments of engine servers."""

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.driver.engines import build_client, build_launch
from rlscale.engines.fake import FakeServer
from rlscale.engines.launch import EngineLaunch, ProcessPlace
from rlscale.engines.launch_sglang import CORES_OF_RANKS, FEATURE_CACHE, IGNORE_PINNING, SglangLaunch, split_cores
from rlscale.engines.sglang.serve import redact_in_logs
from rlscale.errors import EngineError
from rlscale.types import EngineAddress, SamplingParams

PLACE = ProcessPlace(host="127.0.0.1", port=7)


def launch_of(*overrides: str, device: str | None = None) -> EngineLaunch:
    launch = build_launch(load_config(overrides), model_path="/models/m", num_threads=3)
    launch = replace(launch, name="engine 1")
    return launch if device is None else replace(launch, device=device)


def test_embedded_command(tmp_path: Path) -> None:
    command = launch_of("rollout.max_context_len=64", "rollout.num_slots=5").command(PLACE, tmp_path)
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
        # A wrong call of a library is no error of the server.
        logging.getLogger("a_library").warning("no place for secret", "secret")
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == [
        "server_args={'api_key': '<redacted>', 'port': 7}",
        "100 % of {'api_key': '<redacted>'}",
        "no place for <redacted>",
    ]


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
    arguments = launch.arguments(PLACE)
    assert arguments["tp_size"] == 2 and arguments["pp_size"] == 2 and arguments["context_length"] == 20000
    assert arguments["enable_memory_saver"] is True and arguments["device"] == "cuda"
    assert "attention_backend" not in arguments and "mem_fraction_static" not in arguments
    apart = build_launch(load_config([*overrides, "cluster=one_node"]), model_path="m", num_threads=1)
    assert isinstance(apart, SglangLaunch) and "enable_memory_saver" not in apart.arguments(PLACE)


@pytest.mark.parametrize(("longest", "length"), [(64, 70), (508, 512), (512, 512), (None, None)])
def test_a_server_of_sglang_has_room_for_the_tokens_that_it_reserves(
    longest: int | None, length: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 512}')
    lengths = ["rollout.max_response_len=8"] + ([] if longest is None else [f"rollout.max_context_len={longest}"])
    launch = build_launch(load_config(["rollout=sglang", *lengths]), model_path=str(tmp_path), num_threads=1)
    assert isinstance(launch, SglangLaunch)
    assert launch.arguments(PLACE).get("context_length") == length


def test_another_interpreter_does_not_get_this_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("SOMETHING", "else")
    environment = launch_of("rollout=sglang").environment(PLACE)
    assert "PYTHONPATH" not in environment and environment["SOMETHING"] == "else"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert launch_of().environment(PLACE)["PYTHONPATH"] == "/mine"
    assert os.environ["PYTHONPATH"] == "/mine"


def test_a_server_sees_the_gpus_of_its_place() -> None:
    place = replace(PLACE, gpus=("3", "1"))
    for launch in (launch_of("rollout=sglang"), launch_of()):
        assert launch.variables(place)["CUDA_VISIBLE_DEVICES"] == "3,1"
        assert "CUDA_VISIBLE_DEVICES" not in launch.variables(PLACE)


def test_each_rank_of_sglang_on_a_cpu_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of("rollout=sglang", "cluster.rollout_num_gpus=4", "cluster.rollout_num_gpus_per_engine=4")
    monkeypatch.delenv(CORES_OF_RANKS, raising=False)
    assert len(launch.variables(PLACE)[CORES_OF_RANKS].split("|")) == 4
    assert "|" not in launch.variables(replace(PLACE, num_nodes=4))[CORES_OF_RANKS]
    # An engine of one rank uses all cores, on a GPU none are bound, and a binding of the user is kept.
    assert CORES_OF_RANKS not in launch_of("rollout=sglang").variables(PLACE)
    assert CORES_OF_RANKS not in replace(launch, device="cuda").variables(PLACE)
    monkeypatch.setenv(CORES_OF_RANKS, "0|1|2|3")
    assert CORES_OF_RANKS not in launch.variables(PLACE)
    assert launch.environment(PLACE)[CORES_OF_RANKS] == "0|1|2|3"


@pytest.mark.parametrize(
    ("cores", "num_ranks", "found"),
    [([0, 1, 2, 3], 2, "0,1|2,3"), ([4, 6, 7], 2, "4|6"), ([0, 1], 4, "0|1|0|1"), ([5], 2, "5|5")],
)
def test_cores_are_divided_among_the_ranks(cores: list[int], num_ranks: int, found: str) -> None:
    assert split_cores(cores, num_ranks) == found


@pytest.mark.parametrize(
    ("overrides", "saves"),
    [
        ((), False),
        (("cluster.offload_rollout=true",), True),
        (("cluster.offload=true",), True),
        (("cluster=one_node_colocate",), True),
        (("cluster=one_node_colocate", "cluster.offload_rollout=false"), False),
    ],
)
def test_sglang_can_release_its_memory_where_the_run_offloads_it(overrides: tuple[str, ...], saves: bool) -> None:
    given = ("rollout=sglang", "cluster=one_node", "cluster.device=cuda", *overrides)
    assert (launch_of(*given).arguments(PLACE).get("enable_memory_saver") is True) == saves


def test_a_draft_model_keeps_its_weights() -> None:
    given = ("rollout=sglang", "cluster=one_node_colocate", "cluster.device=cuda")
    draft = "sglang.speculative_draft_model_path"
    launch, plain, own = (launch_of(*given, *more) for more in ((f"{draft}=/draft",), (), (f"{draft}=/models/m",)))
    assert launch.address(PLACE).keeps_draft
    assert launch.arguments(PLACE)["enable_draft_weights_cpu_backup"] is True
    for other in (plain, own):  # layers for multi-token prediction are weights of the policy
        assert not other.address(PLACE).keeps_draft
        assert "enable_draft_weights_cpu_backup" not in other.arguments(PLACE)


def test_sglang_prepares_the_adapters_that_it_gets(tmp_path: Path) -> None:
    given = ("rollout=sglang", "train.lora.rank=4", "train.lora.sync=adapter", "rollout.max_staleness=2")
    launch = launch_of(*given)
    assert isinstance(launch, SglangLaunch)
    arguments, address = launch.arguments(PLACE), launch.address(PLACE)
    assert arguments["enable_lora"] is True and arguments["max_lora_rank"] == 4
    assert arguments["max_loras_per_batch"] == 4 and arguments["lora_backend"] == "torch_native"
    assert (address.adapter, address.names_versions) == ("policy", True) and IGNORE_PINNING in launch.variables(PLACE)
    chosen = launch_of(*given, "train.lora.target_modules=[self_attn.q_proj,v_proj]")
    assert chosen.arguments(PLACE)["lora_target_modules"] == ["q_proj", "v_proj"]
    merged = launch_of("rollout=sglang", "train.lora.rank=4")
    assert "enable_lora" not in merged.arguments(PLACE) and merged.address(PLACE).adapter is None
    assert IGNORE_PINNING not in merged.variables(PLACE)


def test_sglang_with_images_takes_token_ids_and_keeps_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    text = launch_of("rollout=sglang")
    assert isinstance(text, SglangLaunch)
    assert "mm_preprocess_cache_size_mb" not in text.arguments(PLACE) and FEATURE_CACHE not in text.variables(PLACE)
    images = launch_of("+experiment=quickstart_vision", "rollout=sglang", "model=tiny_qwen3_vl")
    assert isinstance(images, SglangLaunch)
    assert images.arguments(PLACE)["mm_preprocess_cache_size_mb"] > 0
    # Features that were computed with earlier weights must not be used again.
    assert images.variables(PLACE)[FEATURE_CACHE] == "0"
    monkeypatch.setenv(FEATURE_CACHE, "64")
    assert FEATURE_CACHE not in images.variables(PLACE)


def test_only_sglang_limits_samples_in_flight() -> None:
    address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")
    limited = build_client(load_config(["rollout=sglang", "sglang.server_concurrency=9"]), address)
    assert limited.max_in_flight == 9
    assert build_client(load_config([]), address).max_in_flight is None


@pytest.mark.slow
async def test_a_call_of_an_engine_has_the_limit_of_the_key() -> None:
    with FakeServer(vocab_size=100, max_context_len=256) as fake:
        fake.faults.hangs = True
        address = EngineAddress(name="engine 7", url=fake.url)
        client = build_client(load_config(["rollout.timeout_s=0.3"]), address)
        with pytest.raises(EngineError, match=r"engine 7 .*within 0\.3 s"):
            await client.generate([1, 2], SamplingParams(max_new_tokens=3))
        await client.close()


def test_low_precision_is_declared_to_each_engine(tmp_path: Path) -> None:
    assert "--weight-precision=int4" in launch_of("rollout.weight_precision=int4").command(PLACE, tmp_path)
    assert not any("precision" in each for each in launch_of().command(PLACE, tmp_path))
    overrides = """sglang.json_model_override_args='{"rope_theta": 5}'"""
    launch = launch_of("rollout=sglang", "cluster.device=cuda", "rollout.weight_precision=fp8", overrides)
    arguments = launch.arguments(PLACE)
    # The files are not in FP8: a sync sends all weights before the first request.
    assert arguments["load_format"] == "dummy"
    given = json.loads(arguments["json_model_override_args"])
    assert given["rope_theta"] == 5
    assert given["quantization_config"]["weight_block_size"] == [128, 128]
    assert "load_format" not in launch_of("rollout=sglang", device="cuda").arguments(PLACE)
