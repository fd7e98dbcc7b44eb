"""Weights in named shared memory for SGLang: every rank of every engine reads them, and the trainer frees them."""

import subprocess
import sys

import pytest

SENDER = """
import subprocess, sys
from types import SimpleNamespace
import torch
from rlscale.types import EngineAddress
from rlscale.weights.sglang_payload import SharedStaging
from rlscale.weights.transports.shm_ring import serialize_for

staging = SharedStaging()
engines = [EngineAddress(name=name, url="http://unused", num_ranks=number) for name, number in (("a", 2), ("b", 1))]
for value in (1.0, 2.0):
    staged = staging.copy_in([("weight", torch.full((1000,), value))])
    for engine in engines:
        for payload in serialize_for(SimpleNamespace(address=engine), staged):
            rank = subprocess.run([sys.executable, "-c", sys.argv[1]], input=payload, text=True, check=True)
"""
# As a rank of SGLang does it, which closes the memory once it has copied the weights.
RANK = """
import base64, pickle, sys
((name, tensor),) = pickle.loads(base64.b64decode(sys.stdin.read()))
print(name, tensor.numel(), float(tensor.mean()), flush=True)
del tensor
"""


@pytest.mark.slow
def test_three_ranks_read_the_weights_of_two_syncs() -> None:
    done = subprocess.run([sys.executable, "-c", SENDER, RANK], capture_output=True, text=True, timeout=120)
    # torch ends a process that frees memory with more readers than were counted.
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["weight 1000 1.0"] * 3 + ["weight 1000 2.0"] * 3
