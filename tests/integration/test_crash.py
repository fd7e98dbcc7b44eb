"""Runs that `rlscale-crashtest` kills at random moments, several times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import REWARDED, SMALL

pytestmark = pytest.mark.own_ray


def run_crashtest(
    folder: Path,
    cache: Path,
    *overrides: str,
    num_kills: int,
    victims: tuple[str, ...] = (),
    num_nodes: int = 0,
    name: str | None = None,
) -> dict[str, Any]:
    """The report of a test that passed.

    Args:
        num_nodes: in namespaces, for kills of nodes. 0: this machine alone.
        name: of the report's file. None: the default of the command.
    """
    options = ["--kills", str(num_kills), "--gap", "0", "1", "--seed", "1", "--folder", str(folder / "crash")]
    options += ["--nodes", str(num_nodes)] if num_nodes else []
    options += ["--victims", *victims] if victims else []
    options += ["--name", name] if name is not None else []
    command = [sys.executable, "-m", "rlscale.cli.crashtest", "quickstart", *SMALL, *overrides, *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "RLSCALE_CACHE": str(cache)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    name = name or ("crashtest_quickstart_nodes" if num_nodes else "crashtest_quickstart")
    report: dict[str, Any] = json.loads((folder / "crash" / f"{name}.json").read_text())
    assert report["passed"]
    assert len(report["outcome"]["kills"]) == num_kills
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims",
    [("driver", "engine"), pytest.param(("driver", "trainer", "engine", "router"), marks=pytest.mark.nightly)],
    ids=len,
)
def test_two_ranks_and_two_engines_behind_a_router_repeat_to_the_bit(
    tmp_path: Path, cache: Path, victims: tuple[str, ...]
) -> None:
    places = ("cluster.actor_num_gpus_per_node=2", "cluster.rollout_num_gpus=2", "router.enabled=true")
    length = 6 * len(victims) + 6
    overrides = (f"data.num_rollout={length}", *places)
    report = run_crashtest(tmp_path, cache, *overrides, num_kills=len(victims), victims=victims)
    assert report["differences"] == []
    assert report["num_records"] >= length
    assert {kill["victim"] for kill in report["outcome"]["kills"]} == set(victims)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_stages_of_megatron_that_both_send_weights_repeat_to_the_bit(tmp_path: Path, cache: Path) -> None:
    stages = ("train=megatron", "cluster.actor_num_gpus_per_node=2", "megatron.pipeline_model_parallel_size=2")
    report = run_crashtest(tmp_path, cache, "data.num_rollout=30", *stages, num_kills=2)
    assert report["differences"] == []
    assert report["sample_faults"] == []
    assert report["num_records"] >= 30


@pytest.mark.nightly
def test_with_staleness_no_sample_is_lost_or_used_twice(tmp_path: Path, cache: Path) -> None:
    report = run_crashtest(tmp_path, cache, "data.num_rollout=150", "rollout.max_staleness=2", num_kills=3)
    assert report["sample_faults"] == []
    assert {kill["victim"] for kill in report["outcome"]["kills"]} == {"driver", "trainer", "engine"}
    assert report["differences"] is None


@pytest.mark.nightly
def test_partial_rollouts_and_filters_repeat_with_their_ledger(tmp_path: Path, cache: Path) -> None:
    sampling = (
        "sampling.partial_rollout=true",
        "sampling.round_tokens=4",
        "sampling.over_sampling_batch_size=8",
        "algo.dynamic_sampling=true",
        "rollout.max_response_len=24",
        REWARDED,
    )
    report = run_crashtest(tmp_path, cache, "data.num_rollout=250", *sampling, num_kills=20)
    assert report["differences"] == []
    assert report["sample_faults"] == []
    ledger = (tmp_path / "crash" / "broken" / "ledger.jsonl").read_text()
    assert "dropped/equal_rewards" in ledger


@pytest.mark.nightly
def test_the_middleware_router_and_engines_behind_it_survive_twenty_kills(tmp_path: Path, cache: Path) -> None:
    behind_it = ("router.use_middleware_router=true", "router.policy=consistent_hashing", "cluster.rollout_num_gpus=2")
    # Kills of the router and of engines repeat no steps, so that all of them must fit into the steps of one run.
    steps = ("data.num_rollout=600", "eval.interval=50", "checkpoint.save_interval=50")
    overrides, kinds = (*steps, *behind_it, REWARDED), ("router", "engine")
    report = run_crashtest(tmp_path, cache, *overrides, num_kills=20, victims=kinds, name="crashtest_middleware_router")
    assert (tmp_path / "crash" / "crashtest_middleware_router.md").read_text().startswith("# Crash test: passed")
    assert report["differences"] == []
    assert report["sample_faults"] == []
    assert [kill["victim"] for kill in report["outcome"]["kills"]].count("router") == 10
    assert report["outcome"]["num_starts"] == 1, "the driver keeps running"
