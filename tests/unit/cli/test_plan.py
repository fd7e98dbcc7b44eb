"""The command `rlscale-plan`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.cli.plan import main
from rlscale.config.hydra.config_folders import ConfigFolders

GRPO = ["experiment=qwen3_4b_grpo", "cluster.device=cuda"]


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    assert main([*overrides, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_output_has_every_table(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["algo.tis_clip=3", "rollout.max_prompt_len=9"]) == 0
    text = capsys.readouterr().out
    for title in ("a rollout in which", "placement", "memory of a trainer rank", "memory of an engine", "required"):
        assert title in text
    assert "roofline (lower bound) of a rollout" in text
    assert "batch.global_batch_size = 384: 384 samples per rollout / 1 steps" in text
    assert "algo.tis_clip is ignored" in text
    assert list(tmp_path.iterdir()) == []  # nothing was started, nothing written


def test_json_has_the_sizes_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *GRPO, "--prompt-tokens", "1024", "--response-tokens=3000")
    assert found["batches"]["prompts"] == 32
    assert found["batches"]["samples"] == 256
    assert found["batches"]["tokens"] == 256 * 4024
    assert found["batches"]["samples_per_microbatch"] == 2  # of 4024 tokens, in 9216
    assert found["model_totals"]["parameters"] == 4_022_468_096
    assert found["sync"]["num_bytes"] == 2 * 4_022_468_096
    assert found["hardware"]["name"] == "h100"
    assert found["fits"] is True
    assert [place["actors"] for place in found["places"]] == [
        *[[f"actor rank {i}"] for i in range(4)],
        *[[f"engine {i}"] for i in range(4)],
    ]


def test_larger_hardware_fits_more(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*GRPO, "fsdp.gradient_checkpointing=false"]
    small, large = (planned(capsys, *overrides, "--hardware", name) for name in ("h100", "h200"))
    assert (small["fits"], large["fits"]) == (False, True)
    assert "fsdp.gradient_checkpointing=true" in [fix["overrides"] for fix in small["suggestions"]]
    assert large["suggestions"] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=qwen3_32b"],
        ["model=qwen3_14b", "fsdp.gradient_checkpointing=false"],
        ["model=qwen3_30b_a3b", "train=megatron"],
        ["model=qwen3_32b", "algo=ppo", "cluster=one_node_colocate", "critic.lr=1e-5"],
    ],
)
def test_suggestions_make_the_run_fit(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *GRPO, *overrides)
    assert found["fits"] is False
    assert found["suggestions"]
    for fix in found["suggestions"]:
        assert planned(capsys, *GRPO, *overrides, *fix["overrides"].split())["fits"] is True, fix["overrides"]


def test_an_unsupported_run_of_many_nodes_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "experiment=glm45_355b_a32b", "cluster.device=cuda", "buffer.url=http://10.0.0.1:8000")
    assert any("buffer.url" in line for line in found["unsupported"])
    assert {place["node"] for place in found["places"]} == set(range(8))


@pytest.mark.parametrize("experiment", ConfigFolders.find().groups()["experiment"])
def test_every_experiment_can_be_planned(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, f"experiment={experiment}")
    assert found["experiment"] == experiment
    assert found["fits"] or found["suggestions"]
    assert planned(capsys, f"experiment={experiment}", "on=cpu")["hardware"]["name"] == "cpu"


def test_derived_values_are_not_unsupported_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys)["unsupported"] == []
    (line,) = planned(capsys, "sampling.over_sampling_batch_size=96")["unsupported"]
    assert "sampling.over_sampling_batch_size" in line and "not supported yet" in line


def test_all_errors_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--hardware=h1000", "--prompt-tokens", "many", "algo.eps_clp=1", "optim.lr=fast", "-m"]
    assert main(overrides) == 2
    text = capsys.readouterr().err
    assert text.startswith("rlscale-plan: 5 errors, nothing was started\n")
    assert "--hardware must be one of h100, h200, b200, a100, cpu, got h1000" in text
    assert "did you mean algo.eps_clip?" in text


def test_multirun_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "algo.eps_clip=0.1,0.2", "--hardwre=h100"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("rlscale-plan: 2 errors, nothing was started\n") and "add -m" not in text
    assert (
        "-m must not be used" in text and "--hardwre must be a known flag, got --hardwre; did you mean --hard" in text
    )


def test_an_unknown_model_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    overrides = ["model=hf", "model.hf_checkpoint=someone/unknown", "model.warmup_experiment=null"]
    assert main(overrides) == 2
    assert "model.num_layers must be known to plan a run, got null" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: rlscale-plan" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlscale ")
