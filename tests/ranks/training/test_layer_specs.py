"""The layers of Megatron-core on a machine with a GPU but without Transformer Engine."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import torch

torch.cuda.is_available = lambda: True
from rlscale.training.megatron.model.layer_specs import spec_provider

print(type(spec_provider()).__name__)
"""


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_torch_layers_are_used_without_transformer_engine() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["TorchSpecProvider"], done.stderr
