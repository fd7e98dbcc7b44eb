"""The same trainer, engine and weight channel on a CUDA device, held against the CPU."""

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rlscale.config import AttnImplementation, ComputeDtype, OffloadMode, WeightChannelName
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import OffloadSpec
from rlscale.types import EngineAddress, Generation, SamplingParams, TrainBatch, TrainResult
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.sync import WeightSync
from rlscale.weights.transports.cuda_ipc import CudaIpcTransport
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH = make_batch(RAGGED)
TWO_MICROBATCHES = [[[0, 1, 2, 3, 4], [5, 6, 7]]]
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def cuda_kernels() -> None:
    """Undoes what a rank on the CPU sets: deterministic torch, for which cuBLAS needs a variable at the start."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    join_world(0, 1, "127.0.0.1", free_port("127.0.0.1"), "cpu:gloo,cuda:nccl", TIMEOUT_S)
    yield
    leave_world()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models"))


def three_steps(model_path: str, *, device: str, dtype: ComputeDtype) -> tuple[FsdpBackend, list[TrainResult]]:
    # The kernel that comes with torch: flash-attn may not be installed.
    kernel = AttnImplementation.sdpa
    given = spec(model_path, device=device, dtype=dtype, lr=1e-3, attn_implementation=kernel)
    backend = FsdpBackend(given, rank=0, world_size=1)
    return backend, [backend.train(BATCH, [plan(BATCH, TWO_MICROBATCHES)]) for _ in range(3)]


@pytest.mark.usefixtures("world")
def test_three_steps_in_float32_equal_those_on_the_cpu(model_path: str) -> None:
    gpu, on_gpu = three_steps(model_path, device="cuda", dtype=ComputeDtype.float32)
    cpu, on_cpu = three_steps(model_path, device="cpu", dtype=ComputeDtype.float32)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert b.steps[0][name] == pytest.approx(a.steps[0][name], rel=1e-4, abs=1e-5), name
    for (name, x), (_, y) in zip(cpu.weights(), gpu.weights(), strict=True):
        torch.testing.assert_close(x, y.cpu(), atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.usefixtures("world")
def test_bfloat16_with_variable_length_kernels_is_near_float32(model_path: str) -> None:
    _, exact = three_steps(model_path, device="cuda", dtype=ComputeDtype.float32)
    _, rounded = three_steps(model_path, device="cuda", dtype=ComputeDtype.bfloat16)
    for a, b in zip(exact, rounded, strict=True):
        assert b.steps[0]["entropy"] == pytest.approx(a.steps[0]["entropy"], rel=0.02)
        assert b.steps[0]["grad_norm"] == pytest.approx(a.steps[0]["grad_norm"], rel=0.1)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("mode", [None, OffloadMode.move])
def test_a_loaded_checkpoint_continues_as_its_run(model_path: str, tmp_path: Path, mode: OffloadMode | None) -> None:
    """Also where all models leave the device between the calls."""
    offload = None if mode is None else OffloadSpec(mode=mode)
    made = partial(
        spec, model_path, device="cuda", dtype=ComputeDtype.bfloat16, attn_implementation=AttnImplementation.sdpa
    )
    first, second = (FsdpBackend(made(offload=offload), rank=0, world_size=1) for _ in range(2))
    first.train(BATCH, [plan(BATCH, TWO_MICROBATCHES)])
    first.save(tmp_path)
    second.load(tmp_path)
    for (name, x), (_, y) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(x, y), name
    expected, found = (backend.train(BATCH, [plan(BATCH, TWO_MICROBATCHES)]) for backend in (first, second))
    for name in ("loss", "grad_norm", "entropy"):
        assert found.steps[0][name] == pytest.approx(expected.steps[0][name], rel=1e-3, abs=1e-5), name


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    options = ["--device=cuda", f"--dtype={request.param}", f"--port={port}"]
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={model_path}", *options]
    log_path = tmp_path_factory.mktemp("engine") / "server.log"
    process = EngineProcess(command, name="engine 0", url=url, env=os.environ, log_path=log_path)
    process.start()
    try:
        process.wait_ready(timeout_s=120)
        yield url
    finally:
        process.stop()


def ask(url: str, prompts: list[list[int]], *, n: int = 4) -> list[list[Generation]]:
    async def run() -> list[list[Generation]]:
        engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=TIMEOUT_S)
        params = SamplingParams(max_new_tokens=24, sampling_seed=3, ignore_eos=True)
        try:
            return list(await asyncio.gather(*(engine.generate(p, params, n=n) for p in prompts)))
        finally:
            await engine.close()

    return asyncio.run(run())


def test_answers_do_not_depend_on_neighbours(served: str) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
    together = ask(served, prompts)
    for prompt, answer in zip(reversed(prompts), reversed(together), strict=True):
        assert ask(served, [prompt]) == [answer]


def test_engine_logprobs_are_those_of_transformers(served: str, model_path: str) -> None:
    [[answer]] = ask(served, [[5, 6, 7]], n=1)
    model = load_causal_lm(model_path, dtype=torch.float32).cuda()
    ids = torch.tensor([5, 6, 7, *answer.output_ids], device="cuda")
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0].log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0]
    got = torch.tensor(answer.logprobs, device="cuda")
    exact = _dtype_of(served) == "float32"
    assert (got - expected).abs().mean() < (1e-5 if exact else 0.05)


def open_channel(name: WeightChannelName) -> WeightSync:
    spec = ChannelSpec(
        name=name,
        backend="gloo",  # trainer and engine share the one device, which NCCL refuses
        device="cuda",
        bucket_bytes=20_000,
        timeout_s=TIMEOUT_S,
        folder=Path("unused"),
        model_folder=Path("unused"),
    )
    return make_channel(spec, make_engine=lambda address: HttpEngine(address, timeout_s=TIMEOUT_S), rank=0)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", [WeightChannelName.process_group, WeightChannelName.shared_memory])
def test_trained_weights_reach_the_engine(served: str, model_path: str, name: WeightChannelName) -> None:
    """Over gloo and by CUDA IPC; the checksums hold."""
    dtype = ComputeDtype(_dtype_of(served))
    backend, _ = three_steps(model_path, device="cuda", dtype=dtype)
    channel = open_channel(name)
    assert isinstance(channel.transport, CudaIpcTransport) == (name == WeightChannelName.shared_memory)
    address = EngineAddress(name="engine 0", url=served)
    channel.connect([address])
    report = channel.push(backend.weights(), 7)
    channel.close()
    assert report.num_buckets > 1
    [[answer]] = ask(served, [[5, 6, 7]], n=1)
    assert set(answer.weight_versions) == {7}
    batch = _one_sample([5, 6, 7], answer)
    result = backend.train(batch, [plan(batch, [[[0]]])])
    assert result.metrics["logprob_diff/mean"] < (1e-4 if dtype == ComputeDtype.float32 else 0.05)


def _dtype_of(url: str) -> str:
    async def run() -> str:
        engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=TIMEOUT_S)
        try:
            return str((await engine.info())["dtype"])
        finally:
            await engine.close()

    return asyncio.run(run())


def _one_sample(prompt: list[int], answer: Generation) -> TrainBatch:
    batch = make_batch([(len(prompt), len(answer.output_ids))], group_size=1)
    return replace(
        batch,
        tokens=np.array([*prompt, *answer.output_ids], dtype=np.int32),
        rollout_logprobs=np.array([0.0] * len(prompt) + answer.logprobs, dtype=np.float32),
        weight_versions=np.array([-1] * len(prompt) + answer.weight_versions, dtype=np.int32),
        version=answer.weight_versions[0],
    )
