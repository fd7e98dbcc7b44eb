"""A job of two nodes for tests of the launchers."""

from typing import Any

from rlscale.launch.job import JobSpec
from rlscale.launch.node_needs import NodeNeeds

NEEDS = NodeNeeds(num_nodes=2, gpus=8, cpus=68, memory_gib=512, is_whole=True, slots=8)


def make_job(*overrides: str, **values: Any) -> JobSpec:
    """A job whose values can be replaced."""
    given: dict[str, Any] = {
        "name": "rlscale-test",
        "overrides": overrides or ("experiment=quickstart",),
        "run_dir": "/shared/runs/test",
        "needs": NEEDS,
        "actors": "8 actor ranks, 8 engines",
        "restarts_nodes": False,
        "written_by": "rlscale-launch slurm",
    }
    return JobSpec(**{**given, **values})
