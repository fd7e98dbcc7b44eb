"""The doctor finds nothing wrong on a machine with a GPU."""

import json
from pathlib import Path

import pytest
import torch

from rlscale.cli.doctor import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_no_check_fails(tmp_path: Path) -> None:
    code = main(["--device", "cuda", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "doctor_cuda.json").read_text())
    bad = [check for check in content["checks"] if check["verdict"] in ("failed", "timed_out")]
    assert code == 0 and not bad, json.dumps(bad, indent=1)
