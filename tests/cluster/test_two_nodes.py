"""Runs whose trainers and engines are on two nodes with separate networks."""

import json
from pathlib import Path

import pytest

from tests.cluster.conftest import NEEDS_NAMESPACES, TWO_NODES, ClusterRun

pytestmark = NEEDS_NAMESPACES


def metrics(run: ClusterRun) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_uses_both_nodes_and_prints_their_table(run: ClusterRun, tmp_path: Path) -> None:
    # Actors of a running Ray do not have the working folder of the driver.
    run.run_dir = Path("relative")
    assert run.run(*TWO_NODES, "checkpoint.save_interval=2", folder=tmp_path) == 0, run.output
    run.run_dir = tmp_path / "relative"
    lines = [line.partition("] ")[2].split() for line in run.output.splitlines()]
    table = {words[0]: words for words in lines if words[:1] in (["node"], ["node0"], ["node1"])}
    assert table["node"][:7] == ["node", "address", "interface", "Python", "torch", "transformers", "Ray"]
    assert table["node0"][1:3] == ["10.77.0.1", "eth0"]
    assert table["node1"][1:3] == ["10.77.0.2", "eth0"]
    assert table["node0"][3:] != [] and table["node0"][3:7] == table["node1"][3:7]
    paths = table["node"].index("paths") + 1  # the version of rlscale has two words
    assert table["node"][paths : paths + 2] == ["ports", "clock"]
    assert table["node0"][paths : paths + 2] == table["node1"][paths : paths + 2] == ["same", "free"]
    assert metrics(run)[-1]["step"] == 3
    logs = {path.name for path in (run.run_dir / "logs").glob("*_?.log")}
    assert logs == {"actor_rank_0.log", "actor_rank_1.log", "engine_0.log", "engine_1.log"}
    assert (run.run_dir / "hf" / "config.json").exists()
    assert not list(run.run_dir.glob(".shared_*"))


@pytest.mark.nightly
@pytest.mark.parametrize("channel", ["disk", "delta"])
def test_weights_reach_engines_on_another_node_through_files(run: ClusterRun, channel: str) -> None:
    # Engines that are offloaded keep no weights to which a delta could be applied.
    channels = (f"train.weight_channel={channel}", "cluster.offload_rollout=false")
    assert run.run(*TWO_NODES, *channels) == 0, run.output
    assert metrics(run)[-1]["step"] == 3


def test_shared_memory_is_refused_before_the_start(run: ClusterRun) -> None:
    overrides = ("cluster.actor_num_nodes=1", "train.weight_channel=shared_memory")
    assert run.run(*overrides) == 2, run.output
    assert "train.weight_channel must not be shared_memory, because Ray placed trainer and engines on 2 nodes" in (
        run.output
    )
    assert "use train.weight_channel=process_group" in run.output
    assert not list((run.run_dir / "logs").glob("*"))


def test_folders_that_are_not_shared_are_named_before_the_start(run: ClusterRun, private: Path) -> None:
    run.cache, run.run_dir = private / "cache", private / "run"
    folder = f"train.weight_folder={private / 'weights'}"
    assert run.run(*TWO_NODES, "train.weight_channel=disk", folder) == 2, run.output
    for key, path in {
        "run.dir": run.run_dir,
        "checkpoint.save": run.run_dir / "checkpoints",
        "train.weight_folder": private / "weights",
    }.items():
        assert f"{key} must be on a file system that all nodes share, got {path}, whose files node1 (10.77.0.2)" in (
            run.output
        )
    assert "model.cache_dir must exist on every node" in run.output
    assert not list((run.run_dir / "logs").glob("*"))


@pytest.mark.nightly
def test_the_quickstart_learns_on_two_nodes(run: ClusterRun) -> None:
    assert run.run(*TWO_NODES, "+experiment=quickstart", small=False, timeout_s=1500) == 0, run.output
    assert metrics(run)[-1]["eval/reward_mean"] >= 0.92
