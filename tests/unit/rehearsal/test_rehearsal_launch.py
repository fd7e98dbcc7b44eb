"""Launch of an engine process in a rehearsal: the real one is recorded, another one is started."""

import asyncio
import json
from pathlib import Path

import pytest

from rlscale.engines.launch import API_KEY_VARIABLE, ProcessPlace
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.rehearsal.rehearsal_launch import RehearsalLaunch
from rlscale.rehearsal.rehearsal_reward import RehearsedReward
from rlscale.types import Prompt, Sample

SHARED = {"max_context_len": None, "num_threads": 1, "seed": 1}
TINY = {**SHARED, "model_path": "/tiny", "dtype": "float32", "device": "cpu"}
REAL = SglangLaunch(
    **SHARED,
    name="engine",
    model_path="Qwen/Qwen3-4B",
    dtype="bfloat16",
    device="cuda",
    python=Path("/opt/sglang/bin/python"),
    num_gpus=16,
    server_args={"ep_size": 16},
)
SERVED = EmbeddedLaunch(**TINY, name="engine", num_slots=4, deterministic=False)
PLACE = ProcessPlace(host="10.0.0.2", port=30000, num_nodes=2, rendezvous="10.0.0.2:25000", gpus=("0", "1"))


def launch(served: EmbeddedLaunch | None, *, name: str = "engine 1") -> RehearsalLaunch:
    return RehearsalLaunch(**TINY, name=name, api_key="key", real=REAL, served=served)


def test_the_real_launch_is_recorded_without_its_key(tmp_path: Path) -> None:
    command = launch(SERVED).command(PLACE, tmp_path)
    assert "--model-path=/tiny" in command and "--host=10.0.0.2" in command and "--port=30000" in command
    text = (tmp_path / "engine_1_launch.json").read_text()
    record = json.loads(text)
    assert record["name"] == "engine 1" and record["arguments"]["model_path"] == "Qwen/Qwen3-4B"
    assert record["arguments"]["tp_size"] == 16 and record["arguments"]["nnodes"] == 2
    assert record["variables"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "key" not in record["variables"].values() and API_KEY_VARIABLE not in text


def test_the_server_sees_no_gpu_and_has_the_key() -> None:
    for served in (SERVED, None):
        variables = launch(served).variables(PLACE)
        assert "CUDA_VISIBLE_DEVICES" not in variables and variables[API_KEY_VARIABLE] == "key"


@pytest.mark.parametrize(("served", "node_rank"), [(None, 0), (SERVED, 1)])
def test_other_families_and_further_nodes_get_the_scripted_engine(
    served: EmbeddedLaunch | None, node_rank: int, tmp_path: Path
) -> None:
    place = ProcessPlace(host="10.0.0.3", port=30001, node_rank=node_rank, num_nodes=2)
    command = launch(served).command(place, tmp_path)
    assert command[2:] == ["rlscale.rehearsal.fake_server", "/tiny", "10.0.0.3", "30001"]


def sample(seed: int) -> Sample:
    prompt = Prompt(index=0, text="p", token_ids=(1,), label="2", metadata={})
    return Sample(index=seed, group_index=0, prompt=prompt, seed=seed)


def test_the_reward_of_the_run_is_called_and_gets_chance() -> None:
    scored = [RehearsedReward(lambda each: 10.0)(sample(seed)) for seed in range(20)]
    assert set(scored) == {10.0, 11.0}
    assert RehearsedReward(lambda each: {"a": 1.0, "note": "x"})(sample(0)).keys() == {"a", "note"}
    assert RehearsedReward(lambda each: None)(sample(0)) is None  # the runner reports it


def test_an_async_reward_stays_async() -> None:
    async def reward(each: Sample) -> float:
        return 10.0

    assert asyncio.run(RehearsedReward(reward)(sample(0))) in (10.0, 11.0)


def test_an_error_of_the_reward_is_not_hidden() -> None:
    def broken(each: Sample) -> float:
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        RehearsedReward(broken)(sample(0))
