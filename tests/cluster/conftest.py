"""Several nodes on one machine, of Ray or of Slurm, and runs of the real command on them."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlscale.crashtest.namespaces import reason_unavailable
from rlscale.crashtest.ray_nodes import RayNodes
from tests.cluster.slurm_cluster import SlurmCluster, slurm_cluster
from tests.integration.conftest import REWARDED, SMALL

TWO_NODES = ("cluster.actor_num_nodes=2", "cluster.colocate=true", "cluster.rollout_num_gpus=null")
"""A trainer rank and an engine on each of two nodes with one slot."""

NEEDS_NAMESPACES = pytest.mark.skipif(reason_unavailable() is not None, reason=str(reason_unavailable()))


@dataclass(kw_only=True)
class ClusterRun:
    """Runs `rlscale-train` on the head node of a cluster."""

    nodes: RayNodes
    folder: Path
    cache: Path
    run_dir: Path

    def start(self, *overrides: str, small: bool = True, folder: Path | None = None) -> "subprocess.Popen[bytes]":
        """Starts a run; its output is in `output`."""
        given = (f"run.dir={self.run_dir}", *((*SMALL, REWARDED) if small else ()), *overrides)
        command = [sys.executable, "-m", "rlscale.cli.train", *given, f"cluster.ray_address={self.nodes.address}"]
        env = {**self.nodes.env, "RLSCALE_CACHE": str(self.cache)}
        with (self.folder / "output.txt").open("wb") as output:
            return self.nodes.head.start(command, env=env, output=output, folder=folder)

    def run(self, *overrides: str, small: bool = True, folder: Path | None = None, timeout_s: float = 300) -> int:
        """The exit code of a run, which starts in `folder`."""
        return self.start(*overrides, small=small, folder=folder).wait(timeout_s)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the second node of `two_nodes` does not share with the first."""
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory, private: Path) -> Iterator[RayNodes]:
    """A head node with the driver, and a second node; each has a slot."""
    folder = tmp_path_factory.mktemp("nodes")
    with RayNodes(folder) as nodes:
        nodes.start_head(num_slots=1)
        nodes.add(num_slots=1, private=(private,))
        yield nodes


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of built models."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(two_nodes: RayNodes, tmp_path: Path, cache: Path) -> ClusterRun:
    return ClusterRun(nodes=two_nodes, folder=tmp_path, cache=cache, run_dir=tmp_path / "run")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes with four CPUs each."""
    # Not in pytest's folder: paths of sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm_cluster(Path(folder), num_nodes=2, cpus=4) as found,
    ):
        yield found
