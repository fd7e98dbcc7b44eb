"""The command `rlscale-launch`: checks, files and refusals. Submitting is in tests/ranks/launch and tests/cluster."""

from pathlib import Path

import pytest
import yaml

from rlscale.cli.launch import main

SLURM = ["slurm", "experiment=quickstart"]
KUBERAY = ["kuberay", "--image", "r/i", "--claim", "c", "experiment=quickstart"]
SKYPILOT = ["skypilot", "--bucket", "s3://b", "experiment=quickstart"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, without any tool to submit with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def errors(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out == ""
    heading, *lines = found.err.splitlines()
    lines = [line for line in (heading, *lines) if not line.startswith("warning: ")]
    assert lines[0].startswith("rlscale-launch: ") and lines[0].endswith("nothing was started")
    return [line.strip() for line in lines[1:]]


@pytest.mark.parametrize(("argv", "suffix"), [(SLURM, ".sbatch"), (KUBERAY, ".rayjob.yaml"), (SKYPILOT, ".sky.yaml")])
def test_one_file_is_written_and_the_command_that_submits_it_is_printed(
    argv: list[str], suffix: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "data.num_rollout=3"]) == 0
    out = capsys.readouterr().out
    (file,) = folder.iterdir()
    assert file.name.startswith("rlscale-quickstart-") and file.name.endswith(suffix)
    assert f"submit it with: {'sbatch' if suffix == '.sbatch' else 'kubectl' if 'ray' in suffix else 'sky'}" in out
    assert file.name in out and "1 actor rank, 1 engine" in out
    assert "data.num_rollout=3" in file.read_text()


def test_stdout_is_exactly_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SLURM, "--output", "a.sbatch"]) == 0
    capsys.readouterr()
    assert main([*SLURM, "--output", "a.sbatch", "--stdout"]) == 0
    assert capsys.readouterr().out == (folder / "a.sbatch").read_text()


def test_the_same_file_is_written_again_but_another_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SLURM, "--output", "a.sbatch"]
    assert main(argv) == 0
    assert main(argv) == 0
    (folder / "a.sbatch").write_text("mine")
    capsys.readouterr()
    (error,) = errors(capsys, *argv)
    assert error.startswith("--output must be a new file, got a.sbatch, which has another content; remove a.sbatch")
    assert (folder / "a.sbatch").read_text() == "mine"


def test_all_mistakes_of_options_and_config_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = errors(
        capsys,
        *SLURM,
        "--time",
        "soon",
        "--partiton",
        "gpu",
        "algo.eps_clp=0.1",
        "logging.wandb.key=s3cret",
        "cluster.ray_address=auto",
        "-m",
    )
    text = "\n".join(found)
    for part in ("--time must", "did you mean --partition?", "did you mean algo.eps_clip?", "-m must not be used"):
        assert part in text
    assert "logging.wandb.key must not hold a secret" in text and "s3cret" not in text
    assert "cluster.ray_address must not be given to a job" in text


def test_a_user_function_that_does_not_exist_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = errors(capsys, *SLURM, "reward.custom_path=no_such_module:score")
    assert "reward.custom_path must" in error


def test_submitting_without_the_tool_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, tool in ((SLURM, "sbatch"), (KUBERAY, "kubectl"), (SKYPILOT, "sky")):
        (error,) = errors(capsys, *argv, "--submit")
        assert error.startswith(f"--submit must find the command {tool}, got no such command; run this where {tool}")
    assert list(folder.iterdir()) == []


def test_a_variable_must_be_set_where_the_job_gets_it_from_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    found = errors(capsys, *SLURM, "--submit", "--env", "SOME_KEY")
    assert "--env SOME_KEY must name a variable that is set, got nothing; run `export SOME_KEY=<value>` first" in found


def test_gpus_are_planned_for_unless_the_config_says_otherwise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["slurm", "experiment=qwen3_4b_grpo", "rollout=embedded", "--output", "gpu.sbatch"]) == 0
    assert "#SBATCH --gpus-per-node=8" in (folder / "gpu.sbatch").read_text()
    assert main(["slurm", "experiment=qwen3_4b_grpo", "on=cpu", "--output", "cpu.sbatch"]) == 0
    assert "--gpus-per-node" not in (folder / "cpu.sbatch").read_text()


def test_the_run_folder_is_the_same_for_every_start(folder: Path) -> None:
    assert main([*SLURM, "--output", "a", "--workdir", "/shared"]) == 0
    assert "  run.dir=/shared/runs/quickstart-" in (folder / "a").read_text()
    assert main([*SLURM, "--output", "b", "run.dir=mine"]) == 0
    assert f"  run.dir={folder}/mine \\\n" in (folder / "b").read_text()
    assert main([*KUBERAY, "--output", "c", "--mount", "/data"]) == 0
    (config_map, _) = yaml.safe_load_all((folder / "c").read_text())
    assert "run.dir=/data/runs/quickstart-" in config_map["data"]["run.sh"]


@pytest.mark.parametrize("name", ["50%", 'a"b', "a\\b"])
def test_a_folder_that_would_break_the_script_is_refused(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).mkdir()
    monkeypatch.chdir(folder / name)
    (error,) = errors(capsys, *SLURM)
    assert error.startswith("--workdir must be an absolute path without")
    assert error.endswith("run this in another folder, or add --workdir <folder>")
    assert main([*SLURM, "--workdir", "/shared"]) == 0


def test_a_reference_to_a_variable_makes_it_required(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert main([*SLURM, "--output", "a", "logging.wandb.key='${oc.env:MY_KEY}'"]) == 0
    text = (folder / "a").read_text()
    assert ': "${MY_KEY:?' in text and "s3cret" not in text


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["slrum"], "launcher must be one of slurm, kuberay, skypilot, got slrum; did you mean slurm?"),
        ([*SLURM, "--hardware", "cpu"], "--hardware must be one of h100, h200, b200, a100, got cpu"),
        ([*SLURM, "--stdout", "--submit"], "--stdout must not be used with --submit"),
        (["skypilot", "experiment=quickstart"], "--bucket or --volume must be given, one of the two, got nothing"),
        (
            [*SLURM, "--time", "10:00"],
            "--time must be longer than --save-before, 600 seconds, got 10:00, 600 seconds; write a longer one, or a "
            "smaller --save-before, which must exceed one step",
        ),
    ],
)
def test_a_mistake_of_the_command_is_one_line(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(error in line for line in errors(capsys, *argv))


def test_help_lists_every_option_of_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "slurm|kuberay|skypilot" in capsys.readouterr().out
    assert main(["kuberay", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("--claim VALUE", "--token-secret VALUE", "--submit ", "--output FILE", "--env VALUE"):
        assert flag in out
    assert "where it resumes; default: 3\n" in " ".join(out.split("\n" + " " * 26))
    assert main([]) == 2
    assert main(["--version"]) == 0
