"""Real SGLang with two tensor-parallel ranks, in one process or in one on each of two nodes: samples and weights."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.config import WeightChannelName
from rlscale.config.passthrough.sglang_python import check_python, find_python
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import WeightSyncError
from rlscale.types import EngineAddress, Generation, SamplingParams
from rlscale.weight_types import RankChecksums
from tests.contract.test_weight_sync import open_channel, push_tampered, read_state
from tests.engine_launches import build_launch, open_engine, running
from tests.tiny_model import write_tiny_qwen3

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

PROMPT, GREEDY = [5, 6, 7], SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
TOLERANCE = 1e-5
"""Of logprobs: ranks add the terms of a matrix product in another order."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAddress]:
    if problems := check_python(None, serves=True, routes=False, on_cpu=True):
        pytest.fail("\n".join(map(str, problems)))
    folder = tmp_path_factory.mktemp("sglang")
    launch = build_launch(folder, num_gpus=2, device="cpu", python=find_python(None))
    launch = replace(launch, server_args={"max_total_tokens": 4096})
    opened = open_engine(launch, folder, gpus_per_node=2 // request.param)
    assert len(opened[1]) == request.param
    with running([opened], timeout_s=300) as (address,):
        yield address


def generate(address: EngineAddress) -> tuple[Generation, list[RankChecksums]]:
    async def request() -> tuple[Generation, list[RankChecksums]]:
        client = HttpEngine(address, timeout_s=60)
        try:
            return (await client.generate(PROMPT, GREEDY))[0], await client.checksums()
        finally:
            await client.close()

    return asyncio.run(request())


@torch.no_grad()
def expect(folder: Path) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers, and their logprobs."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, logprobs = list(PROMPT), []
    for _ in range(GREEDY.max_new_tokens):
        logprobs_V = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(logprobs_V.argmax()))
        logprobs.append(float(logprobs_V[ids[-1]]))
    return ids[len(PROMPT) :], logprobs


def test_both_ranks_receive_and_verify_the_weights_of_every_channel(
    engine: EngineAddress, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.num_ranks == 2
    models = [write_tiny_qwen3(tmp_path / "old"), write_tiny_qwen3(tmp_path / "new", seed=1)]
    states, expected = [read_state(model) for model in models], [expect(model) for model in models]
    assert expected[0][0] != expected[1][0]
    for i, name in enumerate(WeightChannelName):
        channel = open_channel(name, tmp_path / name)
        channel.connect([engine])
        for j in (1, 0):
            version = 10 * i + 2 - j
            with caplog.at_level(logging.WARNING):
                # Compares the checksums of all parameters of both ranks; see SglangChecksums.
                channel.push(iter(states[j].items()), version)
            sample, ranks = generate(engine)
            ids, logprobs = expected[j]
            assert sample.output_ids == ids and sample.weight_versions == [version] * len(ids), f"{name} {j}"
            torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(logprobs), atol=TOLERANCE, rtol=0)
            assert [(held.rank, held.size) for held in ranks] == [(0, 2), (1, 2)]
        channel.close()
    assert "not compared" not in caplog.text and "could not be" not in caplog.text and "report" not in caplog.text


@pytest.mark.parametrize(("row", "rank"), [(3, 0), (159, 1)])
def test_a_wrong_bit_on_one_rank_stops_the_run(engine: EngineAddress, tmp_path: Path, row: int, rank: int) -> None:
    state = read_state(write_tiny_qwen3(tmp_path / "old"))
    rule = rf"engine 0 rank {rank} must hold model\.layers\.1\.mlp\.gate_up_proj\.weight with checksum"
    with pytest.raises(WeightSyncError, match=rule):
        push_tampered(engine, state, tmp_path, row=row)
