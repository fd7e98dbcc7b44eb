"""The command `rlscale-migrate`."""

import json
from pathlib import Path

import pytest

from rlscale.cli.migrate import main
from tests.unit.migration.scripts import find

SCRIPT = str(find("slime/624b824/scripts/run-qwen3-4B.sh"))
COMPLETE = ["--hf-checkpoint", "Qwen/Qwen3-4B", "--prompt-data", "p.jsonl", "--rm-type", "math", "--num-rollout", "2"]
COMPLETE += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--label-key", "label", "--colocate"]


def test_a_script_is_written_with_its_report_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path), "--name", "mine", "--", *COMPLETE]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "experiment" / "mine.yaml").is_file()
    assert (tmp_path / "mine.report.txt").read_text() in shown
    assert "GPU" in shown and "rollout" in shown  # the plan


@pytest.mark.slow
def test_losses_have_their_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--output", str(tmp_path), "--", *COMPLETE, "--allgather-cp"]
    assert main(words) == 1
    assert "Lost: " in capsys.readouterr().out
    assert main(["--strict", "--name", "other", *words]) == 1
    assert [file.name for file in (tmp_path / "experiment").iterdir()] == ["migrated.yaml"]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([SCRIPT, "--json", "--dry-run", "--set", "NUM_GPUS=4"])
    found = json.loads(capsys.readouterr().out)
    assert found["project"] == "slime" and "actor_num_gpus_per_node: 4" in found["experiment"]
    lr = next(entry for entry in found["arguments"] if entry["subject"] == "--lr 1e-6")
    assert (lr["kind"], lr["key"], lr["source"]) == ("renamed", "optim.lr", "run-qwen3-4B.sh:103")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "input must be one file or a command line behind --, got nothing; name a script"),
        (["none.sh"], "input must be readable, got "),
        (["/dev/null"], "input must be a file, got /dev/null, a pipe or a device; write it to a file, and name that"),
        ([SCRIPT, "--set", "NUM_GPUS"], "--set must be NAME=VALUE, got NUM_GPUS; write e.g. --set NUM_GPUS=8"),
        ([" "], "input must start a run of slime, verl or TRL, got the command line; name the script"),
        (["loop.sh"], "input must be readable, got loop.sh; Symlink loop from"),
        (["self.yaml"], "input must have plain values only, got "),
        (["deep.yaml"], "input must be valid YAML or JSON, got "),
        (
            ["--name", "../mine", "--", "--lr", "1e-6"],
            "--name must be one word of letters, digits, - and _, got ../mine",
        ),
        (
            ["--name", "", "--", "--lr", "1e-6"],
            '--name must be one word of letters, digits, - and _, got ""; write e.g.',
        ),
        ([__file__], "input must start a run of slime, verl or TRL"),
    ],
)
@pytest.mark.slow
def test_wrong_input(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.sh").symlink_to("loop.sh")
    Path("self.yaml").write_text("actor_rollout_ref: &a {x: *a}\n")
    Path("deep.yaml").write_text("trainer: " + "[" * 3000)
    assert main(words) == 2
    assert f"rlscale-migrate: {message}" in capsys.readouterr().err


def test_a_tilde_of_the_output_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--no-plan", "--output=~/mine", "--", "--lr", "1e-6"]) == 1
    assert (tmp_path / "mine/experiment/migrated.yaml").is_file()
