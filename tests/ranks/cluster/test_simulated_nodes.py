"""Ray nodes with GPUs that do not exist. In a separate process: Ray of this one may belong to other tests."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
import ray
from ray._common.utils import get_ray_address_file
from rlscale.cluster.process_reaper import MARK, marked_processes
from rlscale.cluster.ray_session import placement_group_for
from rlscale.cluster.simulated_nodes import simulated_nodes
from rlscale.config import load_config
from rlscale.plan.placement import build_layout
import os

file = Path(get_ray_address_file(None))  # read by address="auto"; other tests may write to it, too

@ray.remote
def visible():
    return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id()

given = ["cluster.num_gpus_per_node=4", "cluster.actor_num_nodes=2", "cluster.actor_num_gpus_per_node=4"]
given += ["cluster.colocate=true", "cluster.rollout_num_gpus=8", "experiment=sft", "cluster.device=cpu"]
config = load_config(given)
with simulated_nodes(2, 4):
    mark = os.environ[MARK]
    address = ray.get_runtime_context().gcs_address
    assert not file.is_file() or address not in file.read_text(), "other runs must not find these nodes"
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    layout = build_layout(config)
    with placement_group_for(config.cluster, layout) as bundles:
        assert bundles.resource == "GPU"
        calls = [visible.options(**bundles.options(i, 1.0)).remote() for i in range(8)]
        found = ray.get(calls)
    assert len({node for _, node in found}) == 2
    assert len(set(found)) == 8, found
    assert marked_processes(mark)
assert not marked_processes(mark)
print("nodes ended")
"""


def test_actors_get_gpus_that_do_not_exist_and_everything_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0 and "nodes ended" in done.stdout, done.stderr[-3000:]
