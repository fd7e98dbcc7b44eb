"""Logprobs of trainer and embedded engine are bitwise equal: the trainer scores the answers of the engine."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlscale.config import ComputeDtype
from rlscale.engines.embedded.load_decoder import load_decoder
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.engines.server.generate_request import GenerateRequest
from rlscale.errors import ConfigError, WorkerError
from rlscale.models.batch_shapes import EngineShapes
from rlscale.models.hf_models import load_tokenizer
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.types import SamplingParams, TrainBatch
from tests.unit.training.rollouts import plan, spec, tiny_model, tiny_moe

pytestmark = pytest.mark.usefixtures("world")

PROMPT_LENS = (1, 15, 17, 140)
MAX_NEW_TOKENS = 20
TEMPERATURE = 0.8
SHAPES = EngineShapes(num_slots=6, max_new_tokens=MAX_NEW_TOKENS)
DTYPES = {ComputeDtype.float32: torch.float32, ComputeDtype.bfloat16: torch.bfloat16}


@contextmanager
def engine(path: str, dtype: ComputeDtype) -> Iterator[Scheduler]:
    decoder, _ = load_decoder(
        path, lambda path: ({}, {}), dtype=DTYPES[dtype], device=torch.device("cpu"), max_context_len=None
    )
    weights = WeightStore(decoder.weights, decoder.aliases, receiver=None, checksum=None, version="0")
    scheduler = Scheduler(decoder, weights, SchedulerOptions(num_slots=SHAPES.num_slots, num_threads=1))
    scheduler.start()
    yield scheduler
    scheduler.close()


def answered(path: str, dtype: ComputeDtype, *, seed: int = 0) -> TrainBatch:
    """A batch of four answers to a prompt of each length."""
    draw = np.random.default_rng(seed)
    tokens, logprobs, prompt_lens = [], [], []
    with engine(path, dtype) as scheduler:
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE, sampling_seed=seed)
        requests = [
            GenerateRequest(
                rid=str(length),
                input_ids=tuple(draw.integers(3, 14, length).tolist()),
                params=replace(params, stop_token_ids=(5, 6)),
                n=4,
                return_logprob=True,
            )
            for length in PROMPT_LENS
        ]
        for request, future in [(each, scheduler.submit(each)) for each in requests]:
            for answer in future.result(timeout=60):
                tokens.append([*request.input_ids, *answer.output_ids])
                logprobs.append([0.0] * len(request.input_ids) + answer.logprobs)
                prompt_lens.append(len(request.input_ids))
    return batch_of(tokens, logprobs, prompt_lens, draw)


def batch_of(
    tokens: list[list[int]], logprobs: list[list[float]], prompt_lens: list[int], draw: np.random.Generator
) -> TrainBatch:
    num = len(tokens)
    is_response = np.concatenate([np.arange(len(t)) >= p for t, p in zip(tokens, prompt_lens, strict=True)])
    return TrainBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        loss_mask=is_response.astype(np.uint8),
        rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
        weight_versions=np.where(is_response, 0, -1).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum([len(t) for t in tokens]))).astype(np.int64),
        prompt_lens=np.array(prompt_lens, dtype=np.int32),
        rewards=draw.random(num).astype(np.float32),
        group_ids=np.arange(num, dtype=np.int64) // 4,
        trajectory_ids=np.arange(num, dtype=np.int64),
        version=0,
    )


def backend(path: str, *, exact: bool = True, **changes: Any) -> FsdpBackend:
    made = replace(spec(path, true_on_policy_mode=exact, **changes), temperature=TEMPERATURE)
    return FsdpBackend(replace(made, engine_shapes=SHAPES if exact else None), rank=0, world_size=1)


def cut(batch: TrainBatch) -> Any:
    """Two micro-batches with samples of all lengths, and an empty one."""
    return [[[*range(0, batch.num_samples, 2)], [*range(1, batch.num_samples, 2)], []]]


def qwen2(folder: Path) -> str:
    """A model with biases, an untied output layer, and no norms of queries and keys."""
    source = tiny_model(folder)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=14 + 200,  # more than a block of 128, and no multiple of it
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    path = folder / "qwen2"
    model.save_pretrained(path)
    load_tokenizer(source).save_pretrained(str(path))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("make", [tiny_model, qwen2])
def test_logprobs_are_bitwise_equal_to_the_engine(make: Any, dtype: ComputeDtype, cache: Path, tmp_path: Path) -> None:
    path = make(cache)
    trainer = backend(path, dtype=dtype)
    for i in range(2 if make is tiny_model else 1):
        batch = answered(path, dtype, seed=i)
        assert len({*np.diff(batch.offsets).tolist()}) > 5
        result = trainer.train(replace(batch, logprob_samples=(0, 9)), [plan(batch, cut(batch))])
        assert result.metrics["logprob_diff/max"] == 0.0 and result.steps[0]["grad_norm"] > 0
        for sample, values in result.logprobs.items():
            own = slice(batch.offsets[sample], batch.offsets[sample + 1])
            assert np.array_equal(np.asarray(values)[-3:], batch.rollout_logprobs[own][-3:])
        path = str(tmp_path / f"after_{i}")
        trainer.export_hf(Path(path))


@pytest.mark.slow
def test_the_gradient_is_that_of_the_default_forward(cache: Path) -> None:
    path = qwen2(cache)
    batch = answered(path, ComputeDtype.float32)
    found = {}
    for exact in (False, True):
        trainer = backend(path, exact=exact, lr=1.0, clip_grad=0.0, algo={"entropy_coef": 0.01})
        before = {name: weight.clone() for name, weight in trainer.weights()}
        # Adam's first step with a large eps is the gradient, scaled: to well above the last bits of a weight.
        trainer = backend(path, exact=exact, lr=1.0, adam_eps=1e3, clip_grad=0.0, algo={"entropy_coef": 0.01})
        result = trainer.train(batch, [plan(batch, cut(batch))])
        changes = {name: weight - before[name] for name, weight in trainer.weights()}
        found[exact] = (result.steps[0], changes, result.metrics["logprob_diff/max"])
    (plain, changes, difference), (exact_step, exact_changes, exact_difference) = found[False], found[True]
    assert difference > 0.0 == exact_difference  # the usual way rounds otherwise
    assert exact_step == pytest.approx(plain, rel=1e-4, abs=1e-6)
    for name, change in changes.items():
        torch.testing.assert_close(exact_changes[name], change, rtol=1e-3, atol=1e-3 * float(change.abs().max()))


@pytest.mark.slow
def test_old_pass_and_reference_are_bitwise_equal(model_path: str) -> None:
    batch = answered(model_path, ComputeDtype.float32)
    algo = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    changes = {"reuse_logprobs": False, "gradient_checkpointing": True}
    made = replace(spec(model_path, algo=algo, true_on_policy_mode=True, **changes), temperature=TEMPERATURE)
    made = replace(made, engine_shapes=SHAPES, ref_path=model_path)
    result = FsdpBackend(made, rank=0, world_size=1).train(batch, [plan(batch, cut(batch))])
    assert result.metrics["logprob_diff/max"] == 0.0
    assert result.steps[0]["kl_loss"] == 0.0


def test_a_difference_raises(model_path: str) -> None:
    batch = answered(model_path, ComputeDtype.float32)
    other = batch.rollout_logprobs.copy()
    # The smallest possible difference, in one token.
    other[-1] = np.nextafter(other[-1], np.float32(-np.inf))
    trainer = backend(model_path)
    message = "actor rank 0: the logprobs of rollout 0 must equal the engine's bit for bit with "
    message += "train.true_on_policy_mode, got"
    with pytest.raises(WorkerError, match=re.escape(message)):
        trainer.train(replace(batch, rollout_logprobs=other), [plan(batch, cut(batch))])


def test_a_model_with_experts_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.true_on_policy_mode must be false with a qwen3_moe model, got true"):
        backend(tiny_moe(cache))
