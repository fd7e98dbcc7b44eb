"""The doctor with the versions of torch and transformers that a machine for GPUs had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT

TORCH, TRANSFORMERS = "torch==2.11.0", "transformers==5.17.0"
CHECKS = ("torch", "collectives", "fsdp", "attention", "lora", "engine", "shared_memory", "delta", "mfu_small")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("torch", [None, TORCH])
def test_the_doctor_is_fine_with_other_versions(tmp_path: Path, torch: str | None) -> None:
    """With the older transformers, and with the older torch, too, where an index has a build for CPUs."""
    index = os.environ.get("TORCH_INDEX_URL")
    if torch is not None and index is None:
        pytest.skip("TORCH_INDEX_URL must name an index of CPU wheels")
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages)]
    commands = [[*pip, TRANSFORMERS]]
    if torch is not None:
        commands.append([*pip, "--index-url", str(index), "--no-deps", torch])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    # The folder comes before the packages of this interpreter, which provides all others.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT / "src")])}
    command = [sys.executable, "-m", "rlscale.cli.doctor", "--device=cpu", f"--out={tmp_path}", "--deadline-scale=4"]
    done = subprocess.run([*command, "--only", *CHECKS], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "doctor_cpu.md").read_text()
    assert "transformers 5.17.0" in report and (torch is None or "torch 2.11.0" in report)
