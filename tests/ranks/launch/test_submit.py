"""Submission: the tool gets the file, secrets travel in its environment, and its failure is reported."""

import json
import sys
from pathlib import Path

import pytest

from rlscale.cli.launch import main

TOOL = """#!{python}
import json, os, sys
json.dump({{"argv": sys.argv[1:], "token": os.environ.get("RAY_AUTH_TOKEN"), "key": os.environ.get("MY_KEY")}},
          open({record!r}, "w"))
print("Submitted batch job 42")
sys.exit({code})
"""
KUBERAY = ["kuberay", "--image", "r/i", "--claim", "c", "--namespace", "ns"]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> Path:
    """Makes this process find recording tools instead of real ones; returns the record."""
    record = folder / "record.json"
    for name in ("sbatch", "kubectl", "sky"):
        (folder / name).write_text(TOOL.format(python=sys.executable, record=str(record), code=code))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.chdir(folder)
    return record


@pytest.mark.parametrize(
    ("argv", "called", "follow"),
    [
        (["slurm"], ["job.file"], "scancel --batch --signal=USR1 42"),
        (
            KUBERAY,
            ["apply", "--namespace", "ns", "--filename", "job.file"],
            "kubectl --namespace ns logs --follow job/",
        ),
        (
            ["skypilot", "--volume", "v", "--env", "MY_KEY"],
            ["jobs", "launch", "--yes", "--detach-run", "--secret", "RAY_AUTH_TOKEN", "--secret", "MY_KEY", "job.file"],
            "sky jobs logs",
        ),
    ],
)
def test_the_tool_gets_the_file_and_the_follow_up_is_printed(
    argv: list[str],
    called: list[str],
    follow: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = install(tmp_path, monkeypatch)
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert main([*argv, "experiment=quickstart", "--output", "job.file", "--submit"]) == 0
    found = json.loads(record.read_text())
    assert found["argv"] == called
    assert follow in capsys.readouterr().out
    if argv[0] == "skypilot":
        assert found["key"] == "s3cret"
        assert len(found["token"]) == 64
    assert "s3cret" not in (tmp_path / "job.file").read_text()


def test_a_failed_submission_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, code=3)
    assert main(["slurm", "experiment=quickstart", "--output", "job.file", "--submit"]) == 1
    assert "`sbatch job.file` failed with exit code 3; its output is above" in capsys.readouterr().err


def test_a_wrong_override_fails_before_the_tool_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(tmp_path, monkeypatch)
    assert main(["slurm", "experiment=quickstart", "algo.eps_clp=1", "--submit"]) == 2
    assert not record.exists()
    assert not list(tmp_path.glob("*.sbatch"))
