"""The import hook of the plugin for SGLang on a CPU, in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PLUGIN = Path(__file__).parents[3] / "plugins" / "sglang_cpu"
SOURCE = PLUGIN / "src"
# Replaces the wheel of torchvision: refers to its operators while it is imported.
TORCHVISION = "import torch\ntorch.library.register_fake('torchvision::nms')(lambda *a: None)\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "torchvision.py").write_text(TORCHVISION)
    env = {"PYTHONPATH": f"{SOURCE}:{folder}", "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is the one torchvision's wheel is built for")
def test_torchvision_imports_with_the_hook_and_not_without(tmp_path: Path) -> None:
    assert "torchvision::nms does not exist" in run(tmp_path, "import torchvision").stderr
    hook = (PLUGIN / "rlscale_sglang_cpu.pth").read_text()
    done = run(tmp_path, f"{hook}\nimport sys\nassert 'torch' not in sys.modules\nimport torchvision")
    assert done.returncode == 0, done.stderr


def test_the_hook_is_installed_once_and_removed_after_use(tmp_path: Path) -> None:
    code = """
import sys
from rlscale_sglang_cpu.torchvision_hook import TorchvisionFinder, install
install(); install()
assert sum(isinstance(f, TorchvisionFinder) for f in sys.meta_path) == 1
import torchvision
assert not any(isinstance(f, TorchvisionFinder) for f in sys.meta_path)
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
