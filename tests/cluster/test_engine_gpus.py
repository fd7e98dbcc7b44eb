"""Places and environments of engines with several GPUs, on one node that counts sixteen."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.plan.placement import Layout
from tests.cluster.engine_parts import engines_of, gpus_of_trainers, groups_of_two_sizes, last_launch, visible_gpus
from tests.engine_launches import build_launch


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> SglangLaunch:
    return build_launch(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module", autouse=True)
def _sixteen_gpus() -> Iterator[None]:
    ray.init(address="local", num_gpus=16, num_cpus=32, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_separate_engines_have_separate_gpus(launch: SglangLaunch, tmp_path: Path) -> None:
    layout = Layout(num_trainers=3, num_engines=2, gpus_per_engine=4, colocate=False)
    with engines_of(launch, layout, tmp_path) as (engines, bundles):
        own = gpus_of_trainers(bundles, layout)
        addresses = asyncio.run(engines.start())
    assert [address.num_ranks for address in addresses] == [4, 4]
    seen = [gpu for engine in range(2) for gpu in visible_gpus(tmp_path, f"engine {engine}")]
    assert len(seen) == 8 and len({*seen, *own}) == 11
    started = last_launch(tmp_path, "engine 1")
    assert started["argv"][0].endswith("sglang/serve.py")
    assert started["arguments"]["tp_size"] == 4 and "nnodes" not in started["arguments"]
    assert addresses[1].url == f"http://127.0.0.1:{started['arguments']['port']}"


def test_each_rank_of_a_colocated_engine_is_on_the_gpu_of_its_trainer_rank(
    launch: SglangLaunch, tmp_path: Path
) -> None:
    layout = Layout(num_trainers=9, num_engines=2, gpus_per_engine=4, colocate=True)
    with engines_of(launch, layout, tmp_path) as (engines, bundles):
        own = gpus_of_trainers(bundles, layout)
        asyncio.run(engines.start())
    assert len(set(own)) == 9
    assert visible_gpus(tmp_path, "engine 0") == own[:4] and visible_gpus(tmp_path, "engine 1") == own[4:8]


@pytest.mark.nightly
@pytest.mark.parametrize("colocate", [False, True])
def test_engines_of_two_sizes_have_the_gpus_of_their_bundles(
    launch: SglangLaunch, tmp_path: Path, colocate: bool
) -> None:
    groups = groups_of_two_sizes(prefill=2, decode=2)
    layout = Layout(num_trainers=12 if colocate else 3, num_engines=4, gpus_per_engine=4, colocate=colocate)
    layout = replace(layout, num_prefill_engines=2, gpus_per_prefill_engine=2)
    with engines_of(replace(launch, num_gpus=1, groups=groups), layout, tmp_path) as (engines, bundles):
        own = gpus_of_trainers(bundles, layout)
        addresses = asyncio.run(engines.start())
    assert [address.num_ranks for address in addresses] == [2, 2, 4, 4]
    seen = [gpu for engine in range(4) for gpu in visible_gpus(tmp_path, f"engine {engine}")]
    assert len(seen) == len(set(seen)) == 12
    assert (seen == own) if colocate else not set(seen) & set(own)
    sizes = [last_launch(tmp_path, f"engine {engine}")["arguments"]["tp_size"] for engine in range(4)]
    assert sizes == [2, 2, 4, 4]
