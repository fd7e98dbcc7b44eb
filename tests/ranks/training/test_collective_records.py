"""Records of collectives in a fresh interpreter: torch reads their limit once, at the first group of a process."""

import os
import subprocess
import sys

PROGRAM = """
import json
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from rlscale.training.distributed import join_world, leave_world

join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
dist.all_reduce(torch.ones(1))
print(len(json.loads(_dump_fr_trace_json()).get("entries", ())))
leave_world()
"""


def num_records(**variables: str) -> int:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_FR_BUFFER_SIZE"} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_gloo_keeps_records_of_collectives_only_if_they_are_asked_for() -> None:
    assert num_records() == 0
    assert num_records(TORCH_FR_BUFFER_SIZE="10") > 0
