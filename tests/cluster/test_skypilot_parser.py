"""SkyPilot itself reads the file of `rlscale-launch skypilot`. In a separate environment, because it is large."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlscale.cli.launch import main

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

VERSION = "0.14.1"

PARSE = """
import json, sys
import yaml
from sky import Task
config = yaml.safe_load(open(sys.argv[1]))
task = Task.from_yaml_config(config, secrets_overrides=[(name, "x") for name in config["secrets"]])
task.validate_name()
resources = list(task.resources)[0]
print(json.dumps({
    "name": task.name,
    "num_nodes": task.num_nodes,
    "run": task.run,
    "setup": task.setup,
    "accelerators": resources.accelerators,
    "spot": resources.use_spot,
    "secrets": sorted(task.secrets),
    "mounts": sorted([*task.storage_mounts, *task.volumes]),
}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with SkyPilot, kept in the cache of rlscale."""
    root = Path(os.environ.get("RLSCALE_CACHE") or "~/.cache/rlscale").expanduser()
    folder = root / f"skypilot-{VERSION}"
    interpreter = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", f"skypilot=={VERSION}"], check=True)
        (folder / "installed").touch()
    return interpreter


def parse(python: Path, file: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Reads a file with SkyPilot, whose own files go into `home`."""
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
    command = [str(python), "-c", PARSE, str(file)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("argv", "num_nodes", "is_spot"),
    [
        (["--bucket", "s3://my-runs", "--spot"], 1, True),
        (["--volume", "runs", "cluster=two_nodes", "--infra", "aws/us-east-1", "--disk", "500"], 2, False),
    ],
)
def test_the_parser_of_skypilot_accepts_the_file(
    argv: list[str], num_nodes: int, is_spot: bool, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    overrides = ["experiment=qwen3_4b_grpo", "--env", "MY_KEY", "--name", "mine", "--output", str(file)]
    assert main(["skypilot", *argv, *overrides]) == 0
    done = parse(python, file, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    written = yaml.safe_load(file.read_text())
    assert found == {
        "name": "mine",
        "num_nodes": num_nodes,
        "run": written["run"],
        "setup": written["setup"],
        "accelerators": {"H100": 8},
        "spot": is_spot,
        "secrets": ["MY_KEY", "RAY_AUTH_TOKEN"],
        "mounts": ["/rlscale"],
    }


def test_the_parser_finds_a_mistake(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    assert main(["skypilot", "--volume", "runs", "experiment=quickstart", "--output", str(file)]) == 0
    task = yaml.safe_load(file.read_text())
    task["resources"]["graphics_cards"] = "H100:8"
    file.write_text(yaml.safe_dump(task))
    assert parse(python, file, tmp_path).returncode != 0
