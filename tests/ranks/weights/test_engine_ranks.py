"""Weights for engines of several processes and ranks: each rank is a member of the group and receives every weight."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.algo.checksum import checksum
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.types import EngineAddress
from rlscale.weights.engine_groups import EngineGroups, GroupOptions
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from rlscale.weights.transports.gloo_packed import PackedTransport
from tests.engine_launches import build_launch, open_engine, running
from tests.fake_sglang import records
from tests.tiny_weights import make_weights

TIMEOUT_S = 100.0
NUM_RANKS = (4, 1)
"""Of the two engines. The first one has two processes with two ranks each, the second one has a single rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of the engines."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineAddress]]:
    launch = build_launch(tmp_path_factory.mktemp("sglang"), device="cpu")
    opened = [
        open_engine(replace(launch, num_gpus=number), folder, index=index, gpus_per_node=2)
        for index, number in enumerate(NUM_RANKS)
    ]
    with running(opened, timeout_s=TIMEOUT_S) as addresses:
        yield addresses


@pytest.mark.parametrize("in_one_group", [True, False])
def test_every_rank_of_every_process_receives_all_weights(
    engines: list[EngineAddress], folder: Path, in_one_group: bool
) -> None:
    assert [engine.num_ranks for engine in engines] == list(NUM_RANKS)
    options = GroupOptions(bucket_bytes=4096, timeout_s=TIMEOUT_S)
    transport = PackedTransport(options)
    # NCCL has one group of the sender and all engines, gloo one for each engine.
    transport.groups = EngineGroups(options, backend="gloo", in_one_group=in_one_group)
    channel = WeightSync(
        transport,
        make_engine=lambda address: HttpEngine(address, timeout_s=TIMEOUT_S),
        group=SenderGroup(rank=0),
        timeout_s=TIMEOUT_S,
    )
    processes = {"engine 0": 2, "engine 0 node 1": 2, "engine 1": 1}
    before = {name: len(records(folder, name, "weights")) for name in processes}
    weights = make_weights()
    channel.connect(engines)
    report = channel.push(iter(weights.items()), version=3)
    channel.close()
    for name, num_ranks in processes.items():
        received = records(folder, name, "weights")[before[name] :]
        assert len(received) == report.num_buckets and {each["ranks"] for each in received} == {num_ranks}
        found = {tensor: value for each in received for tensor, value in each["checksums"].items()}
        assert found == {tensor: checksum(value) for tensor, value in weights.items()}
