"""The daemons of a real Ray that a run starts."""

import subprocess
import sys

PROGRAM = """
import os
from pathlib import Path

import ray

from rlscale.cluster.ray_daemons import needed_daemons
from rlscale.cluster.ray_end import end_ray

with needed_daemons():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Adder:
    def add(self, a, b):
        return a + b

print("sum", ray.get(Adder.remote().add.remote(2, 3)))
for process in Path("/proc").glob("[0-9]*"):
    try:
        parent = process.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        words = process.joinpath("cmdline").read_bytes().decode().split("\\0")
    except OSError:
        continue  # it has ended
    if int(parent) == os.getpid():
        print("child", *(Path(word).name for word in words[:3]))
end_ray()
print("initialized", ray.is_initialized())
"""


def test_a_run_has_a_control_store_and_a_raylet_and_actors_work() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=200)
    assert "sum 5" in done.stdout and "initialized False" in done.stdout, done.stderr
    children = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("child")]
    assert sorted(children) == ["gcs_server", "raylet"], done.stdout
