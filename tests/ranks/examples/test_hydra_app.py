"""The example of a Hydra application runs as its text says."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

APP = Path(__file__).parents[3] / "examples" / "hydra_app" / "app.py"


def run_app(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(APP), *words], cwd=folder, capture_output=True, text=True)


def test_it_prints_the_config_of_the_run(tmp_path: Path) -> None:
    done = run_app(tmp_path, "rlscale/algo=cispo", "seed=7", "rlscale.optim.lr=1e-4")
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["algo"]["advantage_estimator"] == "cispo" and printed["train"]["seed"] == 7
    assert float(printed["optim"]["lr"]) == 1e-4 and printed["data"]["num_rollout"] == 2


def test_a_broken_rule_ends_it_with_one_message(tmp_path: Path) -> None:
    done = run_app(tmp_path, "rlscale.batch.global_batch_size=50")
    assert done.returncode == 2 and "batch.global_batch_size must" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_it_trains(tmp_path: Path) -> None:
    done = run_app(tmp_path, "dry_run=false", "rlscale.model.warmup_experiment=null")
    assert done.returncode == 0, done.stderr
    assert "held-out reward of addition: " in done.stdout
