"""Patches that run Megatron-core on a CPU, in a separate process because they replace functions of torch."""

import subprocess
import sys

import pytest

from rlscale.errors import ConfigError
from rlscale.training.megatron.model.cpu_patches import check_version

PROGRAM = """
import threading
import torch
from megatron.core.tensor_parallel import random
from rlscale.training.megatron.model.cpu_patches import install_cpu_patches, megatron_device

install_cpu_patches()
install_cpu_patches()
stream = torch.cuda.Stream
assert isinstance(stream, type) and isinstance(torch.cuda.current_stream(), stream)
assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"


def works():
    made = torch.tensor([1.0], device="cuda", pin_memory=True)
    moved = torch.ones(2).cuda().to("cuda:0").to(device=torch.device("cuda"))
    return made.device.type == moved.device.type == "cpu"


def fails():
    try:
        torch.empty(1, device="cuda")
    except (AssertionError, RuntimeError):
        return True
    return False


with megatron_device():
    assert works()
    with megatron_device():
        assert works()
    assert works()  # leaving the inner context keeps the outer one active
    assert torch.ones(1).type() == "torch.FloatTensor"
    exec(compile("name = torch.ones(1).type()", "-", "exec"), called := {"__name__": "megatron.x", "torch": torch})
    assert called["name"] == "torch.cuda.FloatTensor"
    found = []
    other = threading.Thread(target=lambda: found.append(fails()))
    other.start(), other.join()
    assert found == [True]  # each thread enters the context for itself
assert fails()


def enter():
    with megatron_device():
        found.append(works())


other = threading.Thread(target=enter)
other.start(), other.join()
assert found == [True, True]

torch.manual_seed(3)
state = random._get_cuda_rng_state()
first = torch.rand(4)
random._set_cuda_rng_state(state)
assert torch.equal(torch.rand(4), first)
tracker = random.CudaRNGStatesTracker()
tracker.add("one", 7)
with tracker.fork("one"):
    forked = torch.rand(4)
again = torch.rand(4)
random._set_cuda_rng_state(state)
torch.rand(4)
assert torch.equal(torch.rand(4), again)  # a fork does not change the random numbers outside
torch.manual_seed(7)
assert torch.equal(torch.rand(4), forked)
"""


def test_calls_for_cuda_use_the_cpu_in_threads_that_entered() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_another_version_of_megatron_core_is_rejected() -> None:
    check_version("0.16.7")
    with pytest.raises(ConfigError) as raised:
        check_version("0.17.0")
    assert str(raised.value) == (
        "train.backend must have megatron-core 0.16.x to run without CUDA, got megatron with megatron-core 0.17.0; "
        "pip install 'rlscale[megatron]', or choose train=fsdp"
    )
