"""The command `rlscale-plan`."""

import json
import re
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
    assert "batch.global_batch_size = 384: 384 samples per rollout / 1 step\n" in text
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
@pytest.mark.slow
def test_suggestions_make_the_run_fit(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *GRPO, *overrides)
    assert found["fits"] is False
    assert found["suggestions"]
    for fix in found["suggestions"]:
        assert planned(capsys, *GRPO, *overrides, *fix["overrides"].split())["fits"] is True, fix["overrides"]


def test_a_refused_run_of_many_nodes_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "experiment=glm45_355b_a32b", "cluster.device=cuda", "sglang.encoder_only=true")
    assert any("sglang.encoder_only" in line for line in found["refused"])
    assert {place["node"] for place in found["places"]} == set(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ConfigFolders.find().groups()["experiment"])
def test_every_experiment_can_be_planned(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, f"experiment={experiment}")
    assert found["experiment"] == experiment
    assert found["fits"] or found["suggestions"]
    assert planned(capsys, f"experiment={experiment}", "on=cpu")["hardware"]["name"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ConfigFolders.find().groups()["experiment"])
def test_naming_a_gpu_plans_for_gpus(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = planned(capsys, f"experiment={experiment}", "--hardware", "h100")
    assert named == planned(capsys, f"experiment={experiment}", "cluster.device=cuda")
    assert named["hardware"]["name"] == "h100"


@pytest.mark.parametrize("given", [(), ("cluster.device=auto",), ("cluster.device=cuda",), ("on=cpu",)])
def test_the_tables_of_named_hardware_are_those_of_its_device(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for words in (["--hardware=h200", *given], [*given, "cluster.device=cuda", "--hardware=h200"]):
        assert main(["experiment=qwen3_4b_grpo", *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "hardware  h200" in texts[0]


def test_naming_the_cpu_plans_for_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = ["experiment=quickstart", "--hardware=cpu"]
    assert planned(capsys, *quickstart) == planned(capsys, "experiment=quickstart")


@pytest.mark.parametrize(("device", "name", "right"), [("cpu", "h100", "cuda"), ("cuda", "cpu", "cpu")])
def test_another_device_than_that_of_the_hardware_is_an_error(
    device: str, name: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment=qwen3_4b_grpo", "algo.eps_clp=1", f"cluster.device={device}", f"--hardware={name}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("rlscale-plan: 2 errors")
    assert f"cluster.device must be {right} with --hardware {name}, got {device}; remove one of the two" in text


@pytest.mark.parametrize(
    ("name", "advice"), [("H100", "did you mean h100?"), ("h20", "did you mean h200?"), ("tpu-v5p", "remove it")]
)
def test_wrong_hardware_gets_advice(name: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hardware", name]) == 2
    assert f"--hardware must be one of h100, h200, b200, a100, cpu, got {name}; {advice}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ConfigFolders.find().groups()["experiment"])
def test_one_of_something_is_singular(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"experiment={experiment}", "--hardware=h100"]) == 0
    assert re.findall(r"\b1 [a-z]+s\b", capsys.readouterr().out) == []


def test_derived_values_are_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys)["refused"] == []
    assert planned(capsys, "sampling.over_sampling_batch_size=96")["refused"] == []
    (line,) = planned(capsys, "train=megatron", "optim.name=deepspeed_cpu_adam")["refused"]
    assert line.startswith("optim.name must be adam or muon with train.backend=megatron")


def test_all_errors_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--hardware=h1000", "--prompt-tokens", "many", "algo.eps_clp=1", "optim.lr=fast", "-m"]
    assert main(overrides) == 2
    text = capsys.readouterr().err
    assert text.startswith("rlscale-plan: 5 errors, nothing was started\n")
    assert "--hardware must be one of h100, h200, b200, a100, cpu, got h1000; did you mean h100?" in text
    assert "did you mean algo.eps_clip?" in text


@pytest.mark.parametrize("value", ["0", "\u00b2", "many"])
def test_a_length_is_a_number_of_tokens(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt-tokens", value]) == 2
    assert f"--prompt-tokens must be a number of tokens, at least 1, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--cfg", "job"], ["-sc", "install=bash"]])
def test_flags_of_training_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "experiment=quickstart"]) == 2
    assert f"{words[0]} must not be used, got {words[0]}; " in capsys.readouterr().err


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


@pytest.mark.slow
def test_schedules_are_compared_for_lengths_of_the_user(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"length": 900}\n\n' + '{"lengths": [20, 30]}\n' * 9)
    found = planned(capsys, "rollout.num_slots=32", "--schedule", str(path))
    assert found["slots"] == 32 and found["requests_per_slot"] == 12 and found["staleness"] == 0
    assert found["prompts"] == 10 and found["choices"]["plain"]["ratio"] == 1
    assert set(found["choices"]) == {"plain", "longest_first", "tail_batching", "over_sampling", "partial_rollout"}
    assert main([f"--schedule={path}", "rollout.num_slots=32"]) == 0
    text = capsys.readouterr().out
    assert "32 slots, 12 requests per slot, rollout.max_staleness=0" in text
    best = found["fastest_partial_rollout"]
    assert best["ratio"] >= found["choices"]["partial_rollout"]["ratio"] * 0.98
    submitted = best["over_sampling_batch_size"]
    assert f"fastest: sampling=partial sampling.over_sampling_batch_size={submitted} sampling.max_weight_ver" in text


@pytest.mark.slow
def test_costs_of_the_engine_change_the_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"lengths": [20, 30]}\n' * 9)
    costs = "--engine-costs=step_of_one=0.5,request=2"
    free, paid = (planned(capsys, "rollout.num_slots=32", f"--schedule={path}", *flags) for flags in ([], [costs]))
    steps = [found["choices"]["plain"]["steps_per_rollout"] for found in (free, paid)]
    assert steps[1] > steps[0] + 300  # 384 requests of 2 steps, of which decoding is faster
    assert free["engine_costs"] | {"step_of_one": 0.5, "request": 2.0} == paid["engine_costs"]


def test_costs_without_lengths_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine-costs=request=2"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "--engine-costs must be used with --schedule, got no lengths; add --schedule lengths.jsonl" in text


@pytest.mark.parametrize("value", ["request=-1", "request", "requests=1", "step_of_one=0", "step_of_one=1.5", ""])
def test_wrong_costs_are_errors(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["--engine-costs", value]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "--engine-costs must have decoding steps of step_of_one, request, abort, prefill, prefill_token" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--schedule must name a file with lengths, got"),
        ('{"length": 0}', "--schedule must have lines with positive lengths in tokens, got"),
        ("many", "--schedule must have lines with positive lengths in tokens, got many in"),
        (None, "--schedule must name a readable file, got"),
    ],
)
def test_wrong_lengths_are_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "lengths.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["--schedule", str(path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
