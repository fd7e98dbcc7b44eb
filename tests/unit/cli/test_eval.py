"""The command `rlscale-eval`: origin of the weights, new rewards for kept samples, wrong input in one line each."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlscale.checkpoint.store import CheckpointStore
from rlscale.cli.eval import main
from rlscale.config import load_config, to_yaml
from rlscale.driver.eval_source import FORCED, eval_overrides, export_folder, find_run, find_source, quoted
from rlscale.driver.preflight.data_files import check_prompts
from rlscale.errors import ConfigError
from rlscale.observe.evaluation_files import EvaluationFiles, Measured, find_evaluations, read_about, read_records
from rlscale.types import Group, Prompt, Sample, SampleStatus
from tests.weight_files import write_no_weights

ANSWERS = ("2", "3", "two 2", "4")


@cache
def config_text(*overrides: str) -> str:
    """The YAML of a config, which many runs of these tests have."""
    return to_yaml(load_config(overrides))


def made_run(folder: Path, *overrides: str, versions: Sequence[int] = (0, 3)) -> Path:
    """A run folder with kept evaluations of one set with two prompts, graded 0."""
    given = ["experiment=quickstart", "eval.prompt_data=[sums,sums.jsonl]", *overrides]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_text(*given))
    files = EvaluationFiles(folder, keep_last=None, resume_at=99)
    for version in versions:
        writer = files.open(Measured.of_run(version, version), {"sums": {"path": "sums.jsonl", "num_samples": 2}})
        assert writer is not None
        for row in range(2):
            writer.add("sums", made_group(row))
        writer.commit({"eval/sums/reward_mean": 0.0, "eval/reward_mean": 0.0})
    return folder


def made_group(row: int) -> Group:
    prompt = Prompt(index=row, text="1+1=", token_ids=(1, 2), label="2")
    samples = []
    for i in range(2):
        sample = Sample(index=2 * row + i, group_index=row, prompt=prompt, seed=i)
        sample.append([5, 6], logprobs=[-0.5, -0.5], weight_versions=[0, 0])
        sample.response, sample.status, sample.reward = ANSWERS[sample.index], SampleStatus.completed, 0.0
        samples.append(sample)
    return Group(index=row, prompt=prompt, samples=samples)


def metrics(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = read_about(run / "evaluations" / name)["metrics"]
    return found


def test_samples_are_graded_again_next_to_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run")
    assert main(["--regrade", str(run)]) == 0
    assert [path.name for path in find_evaluations(run)] == [
        "v00000000",
        "v00000000.regrade",
        "v00000003",
        "v00000003.regrade",
    ]
    assert "version 3: eval/sums/reward_mean 0.0000 -> 0.2500" in capsys.readouterr().out
    after = metrics(run, "v00000003.regrade")
    assert (after["eval/sums/reward_mean"], after["eval/weight_version"]) == (0.25, 3)
    assert after["eval/sums/pass@2"] == 0.5 and metrics(run, "v00000003")["eval/sums/reward_mean"] == 0.0
    records = list(read_records(run / "evaluations" / "v00000003.regrade" / "0_sums.jsonl"))
    assert sorted(sample["reward"] for record in records for sample in record["samples"]) == [0, 0, 0, 1]


def test_another_reward_and_the_file_of_sets_count(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", versions=[1])
    assert main(["--regrade", str(run), "reward.type=f1"]) == 0
    assert metrics(run, "v00000001.regrade")["eval/sums/reward_mean"] == pytest.approx((1 + 2 / 3) / 4)
    sets = tmp_path / "sets.yaml"
    sets.write_text("datasets: {sums: {path: gone.jsonl, rm_type: random, metadata_overrides: {split: test}}}\n")
    assert main(["--regrade", str(run), f"eval.config={sets}"]) == 0
    about = read_about(run / "evaluations" / "v00000001.regrade")
    assert about["sets"]["sums"]["reward"] == "random" and about["regrade_of"] == "v00000001"
    (first, _) = read_records(run / "evaluations" / "v00000001.regrade" / "0_sums.jsonl")
    assert first["metadata"] == {"rm_type": "random", "split": "test"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: rlscale-eval"),
        (["eval.interval=1"], "SOURCE must name a run, a checkpoint or a model, got nothing"),
        (
            ["--regrade"],
            "--regrade must be followed by a run, got nothing; e.g. rlscale-eval --regrade runs/quickstart-",
        ),
        ([".", "--regrade"], "--regrade must be followed by a run, got nothing; e.g. rlscale-eval --regrade ."),
        (["--regrade", "nowhere"], "--regrade must be a run folder, got nowhere; it has no config.yaml"),
        (["nowhere/a/b"], "SOURCE must name an existing folder or a hub id, got 'nowhere/a/b'"),
        (["."], "SOURCE must be a run, a checkpoint or a model, got .; it has none of their files"),
        (["run"], "SOURCE must be a run with weights, got run; it has neither a checkpoint nor a finished export"),
        (["--regrade", "run", "data.num_rollout=3"], "data.num_rollout must not be set here, got 3; remove it"),
        (["--regrade", "run", "model.hf_checkpoint=a/b"], "model.hf_checkpoint must not be set here, got a/b"),
        (["--regrade", "run", "eval.nothing=3"], "eval.nothing must be a known key, got 3"),
        (["--regrade", "run", "-m"], "--multirun must not be used here, got -m"),
        (["--regrade", "run", "-sc", "install=bash"], "-sc must not be used here, got -sc; use rlscale-train -sc"),
        (["--regrade", "run", "eval.prompt_data=[other,a.jsonl]"], "must contain the sets that run/evaluations/v0000"),
        (["--regrade", "run", "eval.config=gone.yaml"], "eval.config must name a readable YAML file, got gone.yaml"),
        (["--regrade", "run", "reward.custom_path=nowhere:score"], "reward.custom_path must be importable"),
        (["--regrade", "empty"], "--regrade must be a run with kept evaluations, got empty"),
        (["--regrade", "broken"], "config.yaml must be the config of a run, got [1]"),
        (["--regrade", "text"], "config.yaml must be the config of a run, got run.overrides; pass the run folder"),
        (["groups"], "config.yaml must be the config of a run, got train; pass the run folder"),
        (["--regrade", "cut"], "0_sums.jsonl, row 3 must be the samples of a prompt, got '{'"),
    ],
)
def test_wrong_input_is_one_line_without_a_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "run")
    made_run(tmp_path / "empty", versions=[])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("[1]")
    for name, text in {"text": "run: {overrides: 3}", "groups": "train: [1]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    cut = made_run(tmp_path / "cut") / "evaluations" / "v00000003" / "0_sums.jsonl"
    cut.write_text(cut.read_text() + "{")
    assert main(words) == 2
    printed = capsys.readouterr()
    lines = [line for line in (printed.err or printed.out).splitlines() if message in line]
    assert len(lines) == 1 and "Traceback" not in printed.err


def test_a_finished_run_gives_its_export_and_an_unfinished_one_its_newest_checkpoint(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "algo.eps_clip=0.1", "run.name=x", "data.num_rollout=9")
    store = CheckpointStore(run / "checkpoints", keep_last=2)
    for rollout in (3, 5):
        store.begin(rollout)
        store.commit(rollout, {"progress": {"next_rollout": rollout, "version": rollout - 1}})
    newest = find_source(str(run))
    assert newest.checkpoint is not None and newest.checkpoint.rollout_id == 5
    assert (newest.version, newest.num_rollouts, newest.run) == (4, 5, run)
    earlier = find_source(str(run / "checkpoints" / "rollout_00000003"))
    assert (earlier.version, earlier.name) == (2, "run") and earlier.measured.weights == earlier.weights
    assert export_folder(newest, tmp_path).parent == tmp_path / "exports"
    assert export_folder(newest, tmp_path) != export_folder(earlier, tmp_path)
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    (run / "finished.json").write_text("{}")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 8, "weights/version": 7.0}) + "\n")
    finished = find_source(str(run))
    assert finished.checkpoint is None and finished.weights == str(run / "hf")
    assert (finished.version, finished.num_rollouts) == (7, 9)


def test_a_checkpoint_outside_of_a_run_needs_the_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "alone", keep_last=1)
    store.begin(1)
    store.commit(1, {"progress": {"next_rollout": 1, "version": 1}})
    with pytest.raises(ConfigError, match="be a checkpoint inside of its run folder"):
        find_source(str(tmp_path / "alone"))


def test_overrides_of_the_run_come_first_without_those_of_training(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run", "run.name=x", "optim.lr=1e-4", "eval.temperature=0.2", "rollout.max_response_len=8"
    )
    source = find_run(str(run))
    found = eval_overrides(source, ["eval.prompt_data=[a,a.jsonl]"], model='a "b"')
    assert found[:3] == ["experiment=quickstart", "eval.temperature=0.2", "rollout.max_response_len=8"]
    assert not any(text.startswith(("optim", "run.name=x")) for text in found)
    assert found[-1] == 'model.hf_checkpoint="a \\"b\\""' and "eval.config=null" in found
    # An option of a group replaces the whole group of the run.
    assert "eval.temperature=0.2" not in eval_overrides(source, ["eval=gsm8k"], model="m")
    config = load_config(eval_overrides(source, [], model="m"))
    assert config.debug.rollout_only and config.data.num_rollout == 0 and config.eval.interval == 1
    assert config.model.hf_checkpoint == "m" and config.model.build is None
    assert config.run.name == "eval-run-v0" and set(FORCED) <= {text.partition("=")[0] for text in found}


def test_a_supervised_run_is_evaluated_with_an_algorithm_that_generates(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "algo=sft", "batch.n_samples_per_prompt=1")
    config = load_config(eval_overrides(find_run(str(run)), [], model="m"))
    assert config.algo.loss_type == "policy_loss" and config.debug.rollout_only


def test_a_megatron_run_reads_the_fields_of_its_export(tmp_path: Path) -> None:
    source = find_run(str(made_run(tmp_path / "run", "train=megatron")))
    assert load_config(eval_overrides(source, [], model="m")).model.use_hf_config_for_megatron
    assert load_config(eval_overrides(source, [])).model.build == "tiny_qwen3", "before its export"


def test_a_model_has_no_option_of_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    write_no_weights(tmp_path / "model.safetensors")
    source = find_source(str(tmp_path))
    assert source.weights == str(tmp_path) and source.run is None and source.version == 0
    config = load_config(
        eval_overrides(source, ["+experiment=qwen3_4b_grpo", "data.prompt_data=null"], model=source.weights)
    )
    assert config.model.num_layers is None and config.model.hf_checkpoint == str(tmp_path)
    assert quoted("a\\b") == '"a\\\\b"'


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "--regrade RUN" in out and "rlscale 0" in out


def test_no_training_prompts_are_needed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "data.prompt_data=gone.jsonl", "run.name=x")
    config = load_config(eval_overrides(find_run(str(run)), [], model="m"))
    assert check_prompts(config) == []
