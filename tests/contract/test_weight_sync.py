"""Every weight channel into a real server: its answers come from the weights that were sent."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlscale.algo.checksum import checksum
from rlscale.config import WeightChannelName
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import EngineAddress, Generation, SamplingParams
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.safetensors_folder import map_file
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from rlscale.weights.transports.disk import DiskTransport
from tests.contract.conftest import Target, open_embedded
from tests.tiny_model import write_tiny_qwen3

PARAMS = SamplingParams(max_new_tokens=20, sampling_seed=1, ignore_eos=True)
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    # A separate server: other tests rely on the weights of the contract suite's server.
    with open_embedded(tmp_path_factory.mktemp("sync")) as target:
        yield target


def open_channel(name: WeightChannelName, folder: Path) -> WeightSync:
    spec = ChannelSpec(
        name=name,
        backend="gloo",
        device="cpu",
        bucket_bytes=50_000,
        timeout_s=TIMEOUT_S,
        folder=folder / "weights",
        model_folder=folder / "old",
    )
    return make_channel(spec, make_engine=lambda address: HttpEngine(address, timeout_s=TIMEOUT_S), rank=0)


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def generate_and_checksum(address: EngineAddress) -> tuple[list[Generation], dict[str, str]]:
    async def request() -> tuple[list[Generation], dict[str, str]]:
        engine = HttpEngine(address, timeout_s=TIMEOUT_S)
        try:
            return await engine.generate([5, 6, 7], PARAMS, n=3), dict((await engine.checksums())[0].checksums)
        finally:
            await engine.close()

    return asyncio.run(request())


@pytest.mark.parametrize("name", list(WeightChannelName))
def test_answers_follow_the_weights_that_were_sent(embedded: Target, tmp_path: Path, name: WeightChannelName) -> None:
    address = EngineAddress(name="engine 0", url=embedded.url)
    old = read_state(write_tiny_qwen3(tmp_path / "old"))
    new = read_state(write_tiny_qwen3(tmp_path / "new", seed=1))
    before, _ = generate_and_checksum(address)
    channel = open_channel(name, tmp_path)
    channel.connect([address])
    channel.push(iter(new.items()), 1)
    changed, held = generate_and_checksum(address)
    assert held == {name: checksum(tensor) for name, tensor in new.items()}
    assert changed[0].weight_versions == [1] * 20
    assert [a.output_ids for a in changed] != [a.output_ids for a in before]
    channel.push(iter(old.items()), 2)
    again, _ = generate_and_checksum(address)
    assert [(a.output_ids, a.logprobs) for a in again] == [(a.output_ids, a.logprobs) for a in before]
    channel.close()


@pytest.mark.parametrize("name", list(WeightChannelName))
def test_wrong_weights_are_refused_in_time_and_the_next_sync_succeeds(
    embedded: Target, tmp_path: Path, name: WeightChannelName
) -> None:
    address = EngineAddress(name="engine 0", url=embedded.url)
    state = read_state(write_tiny_qwen3(tmp_path / "old"))
    channel = open_channel(name, tmp_path)
    channel.connect([address])
    with pytest.raises(EngineError, match=r"engine 0 .*shapes must be .*model\.norm\.weight"):
        channel.push(iter({**state, "model.norm.weight": torch.ones(3)}.items()), 3)
    with pytest.raises(EngineError, match=r"unusable|within"):
        # Some weights may be new, or the engine is still paused: it must not answer from them.
        asyncio.run(_generate_quickly(address))
    channel.connect([address])
    channel.push(iter(state.items()), 4)
    assert generate_and_checksum(address)[0][0].weight_versions == [4] * 20
    channel.close()


async def _generate_quickly(address: EngineAddress) -> None:
    engine = HttpEngine(address, timeout_s=1.0)
    try:
        await engine.generate([5, 6, 7], PARAMS)
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_sglang_reads_every_channel_and_its_checksums_are_compared(sglang: Target, tmp_path: Path) -> None:
    old = read_state(write_tiny_qwen3(tmp_path / "old"))
    new = read_state(write_tiny_qwen3(tmp_path / "new", seed=1))
    address = EngineAddress(name="engine 0", url=sglang.url)
    before = generate_and_checksum(address)[0]
    for i, name in enumerate(WeightChannelName):
        channel = open_channel(name, tmp_path / name)
        channel.connect([address])
        for j, state in enumerate((new, old, new, old)):
            channel.push(iter(state.items()), 10 * i + j + 1)
            now = generate_and_checksum(address)[0]
            assert now[0].weight_versions == [10 * i + j + 1] * 20
            same = [a.output_ids for a in now] == [a.output_ids for a in before]
            assert same == (state is old), f"{name} {j}"
        channel.close()
    with pytest.raises(WeightSyncError, match=r"engine 0 must hold model\.layers\.1\.mlp\.gate_up_proj\.weight with"):
        push_tampered(address, old, tmp_path)
    channel = open_channel(WeightChannelName.process_group, tmp_path)
    channel.connect([address])
    channel.push(iter(old.items()), 101)
    assert [a.output_ids for a in generate_and_checksum(address)[0]] == [a.output_ids for a in before]
    channel.close()


def push_tampered(address: EngineAddress, state: dict[str, torch.Tensor], folder: Path, *, row: int = 3) -> None:
    """Changes one bit of a row in the folder after the trainer computed the checksums."""
    victim = "model.layers.1.mlp.up_proj.weight"

    class Tampering(HttpEngine):
        async def update_from_disk(self, path: Path, **arguments: object) -> None:  # type: ignore[override]
            for file in path.glob("*.safetensors"):
                tensors = map_file(file)
                if victim in tensors:
                    tensors[victim].view(torch.int32)[row, 3] ^= 1
            await super().update_from_disk(path, **arguments)  # type: ignore[arg-type]

    group = SenderGroup(rank=0)
    channel = WeightSync(
        DiskTransport(folder / "tampered", group=group, bucket_bytes=50_000),
        make_engine=lambda a: Tampering(a, timeout_s=TIMEOUT_S),
        group=group,
        timeout_s=TIMEOUT_S,
    )
    channel.connect([address])
    try:
        channel.push(iter(state.items()), 100)
    finally:
        channel.close()
