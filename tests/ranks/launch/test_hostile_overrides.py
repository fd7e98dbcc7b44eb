"""Overrides with quotes, dollars, newlines and spaces arrive in the run as they were typed, from every kind of file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlscale.launch.kuberay import SCRIPT, write_kuberay
from rlscale.launch.node_needs import NodeNeeds
from rlscale.launch.options import KubeRayOptions, SkyPilotOptions, SlurmOptions
from rlscale.launch.skypilot import write_skypilot
from rlscale.launch.slurm import write_slurm
from tests.unit.launch.jobs import make_job

HOSTILE = (
    "a='b c'",
    'b="$HOME" ${PATH} `id` $(id)',
    "c=one\ntwo\n",
    "d=\\ \\' \\n %s {x} {{y}}",
    "e=é\t*?[!a] #comment; exit 3 & | > out",
    "f=it's",
    "g=",
    "-h=--",
)
ONE_NODE = NodeNeeds(num_nodes=1, gpus=0, cpus=2, memory_gib=4, is_whole=False, slots=2)

# Stands for every program that a file calls: records the arguments of the run, pretends to be Ray, and runs the rest.
FAKE = """#!{python}
import json, os, sys, time
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "rlscale-train":
    json.dump([sys.argv[0], *args], open({record!r}, "w"))
    sys.exit(7)
if name == "srun":
    while args and args[0].startswith("--"):
        args.pop(0)
    os.environ |= {{"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}}
    os.execvp(args[0], args)
if name == "ray":
    time.sleep(60)
if name == "scontrol":
    print("n1")
if name == "python" and args[0] == "-c":
    os.execv({python!r}, [{python!r}, *args])
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the recorded arguments; fakes of all programs come first on PATH."""
    found, folder = tmp_path / "arguments.json", tmp_path / "bin"
    folder.mkdir()
    for name in ("rlscale-train", "srun", "ray", "scontrol", "python"):
        (folder / name).write_text(FAKE.format(python=sys.executable, record=str(found)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_NNODES", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "127.0.0.1\n")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "0")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "1")
    return found


def run(script: Path, record: Path, folder: Path) -> list[str]:
    done = subprocess.run(["bash", str(script)], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr  # the exit code of the run
    arguments: list[str] = json.loads(record.read_text())
    return arguments[1:]


@pytest.mark.parametrize("folder_name", ["plain", "with space $HOME 'x'"])
def test_slurm(tmp_path: Path, record: Path, folder_name: str) -> None:
    folder = tmp_path / folder_name
    folder.mkdir()
    job = make_job(*HOSTILE, needs=ONE_NODE, written_by="x\ntouch harmed")
    script = tmp_path / "job.sbatch"
    script.write_text(write_slurm(job, SlurmOptions(workdir=str(folder))))
    assert run(script, record, tmp_path) == list(job.train_command[1:])
    assert not (tmp_path / "harmed").exists() and not (folder / "harmed").exists()


def test_kuberay(tmp_path: Path, record: Path) -> None:
    job = make_job(*HOSTILE, written_by="x\ntouch: harmed")
    text = write_kuberay(job, KubeRayOptions(image="i", claim="c", mount=str(tmp_path)), ray_version="2.60.0")
    config_map, _ = yaml.safe_load_all(text)
    script = tmp_path / SCRIPT
    script.write_text(config_map["data"][SCRIPT])
    assert run(script, record, tmp_path) == list(job.train_command[1:])


def test_skypilot(tmp_path: Path, record: Path) -> None:
    job = make_job(*HOSTILE, needs=ONE_NODE, written_by="x\ntouch: harmed")
    task = yaml.safe_load(write_skypilot(job, SkyPilotOptions(bucket="s3://b")))
    script = tmp_path / "run.sh"
    script.write_text(task["run"])
    assert run(script, record, tmp_path) == list(job.train_command[1:])


def test_the_submitter_of_kuberay_gets_no_character_that_a_shell_would_change() -> None:
    text = write_kuberay(make_job(*HOSTILE), KubeRayOptions(image="i", claim="c"), ray_version="2.60.0")
    _, ray_job = yaml.safe_load_all(text)
    assert ray_job["spec"]["entrypoint"] == "bash /etc/rlscale-job/run.sh"
