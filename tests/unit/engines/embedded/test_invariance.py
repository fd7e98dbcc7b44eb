"""The bits of an answer depend only on weights, prompt, parameters and seed, not on concurrent requests."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.server.generate_request import Answer
from rlscale.models.hf_models import load_causal_lm
from tests.tiny_model import EOS_ID, FAMILIES, VOCAB_SIZE, write_tiny, write_tiny_qwen3, write_tiny_qwen3_moe
from tests.unit.engines.embedded.conftest import OpenScheduler, generate, make_request

Spec = dict[str, Any]


def specs() -> list[Spec]:
    """Requests of many prompt lengths, answer lengths (so several decode batches), `n` and sampling parameters."""
    draw = random.Random(0)
    made = []
    for i in range(24):
        made.append(
            {
                "input_ids": [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 3, 6, 15, 16, 17, 60, 140]))],
                "n": draw.choice([1, 1, 2, 5]),
                "max_new_tokens": draw.choice([1, 2, 7, 20, 33]),
                "temperature": draw.choice([1.0, 0.7, 0.0]),
                "top_p": draw.choice([1.0, 0.8]),
                "top_k": draw.choice([-1, 5]),
                "sampling_seed": i,
            }
        )
    for spec in made[::2]:
        spec["min_p"] = draw.choice([0.05, 0.3])
        spec["min_new_tokens"] = draw.randrange(spec["max_new_tokens"] + 1)
        spec["stop"] = draw.choice([(), ("e",), ("ab", "!")])
    return made


def bits(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(answer.output_ids, answer.logprobs) for answer in answers]


def submit_in_order(scheduler: Scheduler, order: list[int]) -> dict[int, list[tuple[list[int], list[float]]]]:
    """Submits all requests at once in this order and returns the bits of their answers."""
    all_specs = specs()
    futures = {i: scheduler.submit(make_request(**all_specs[i])) for i in order}
    return {i: bits(future.result(timeout=60)) for i, future in futures.items()}


@pytest.fixture(scope="module")
def order() -> list[int]:
    return list(range(len(specs())))


@pytest.mark.slow
def test_alone_among_others_and_in_any_order(open_scheduler: OpenScheduler, order: list[int]) -> None:
    scheduler = open_scheduler()
    alone = {i: bits(generate(scheduler, **spec)) for i, spec in enumerate(specs())}
    assert submit_in_order(scheduler, order) == alone
    assert submit_in_order(scheduler, order[::-1]) == alone
    shuffled = order.copy()
    random.Random(1).shuffle(shuffled)
    assert submit_in_order(scheduler, shuffled) == alone


OTHER_MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_moe": write_tiny_qwen3_moe,
    **{name: partial(write_tiny, family=name) for name in FAMILIES},
}


@pytest.mark.parametrize("family", OTHER_MODELS)
@pytest.mark.slow
def test_other_layers_do_not_depend_on_other_rows(
    open_scheduler: OpenScheduler, order: list[int], tmp_path: Path, family: str
) -> None:
    scheduler = open_scheduler(path=OTHER_MODELS[family](tmp_path))
    alone = {i: bits(generate(scheduler, **spec)) for i, spec in enumerate(specs())}
    assert submit_in_order(scheduler, order) == alone
    assert submit_in_order(scheduler, order[::-1]) == alone


@pytest.mark.slow
def test_two_engines_agree(open_scheduler: OpenScheduler, order: list[int]) -> None:
    assert submit_in_order(open_scheduler(), order) == submit_in_order(open_scheduler(), order)


def test_sample_j_of_n_is_the_request_with_seed_plus_j(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    params: Spec = {"max_new_tokens": 12, "ignore_eos": True}
    together = generate(scheduler, [5, 6, 7], n=12, sampling_seed=100, **params)  # more than the slots
    alone = [generate(scheduler, [5, 6, 7], sampling_seed=100 + j, **params)[0] for j in range(12)]
    assert bits(together) == bits(alone)


def test_an_interrupted_answer_continues_with_the_same_tokens(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    whole = generate(scheduler, [5, 6, 7], max_new_tokens=16, sampling_seed=3, ignore_eos=True)[0]
    continuation = generate(
        scheduler, [5, 6, 7, *whole.output_ids[:6]], max_new_tokens=10, sampling_seed=3, ignore_eos=True
    )[0]
    assert continuation.output_ids == whole.output_ids[6:]
    assert continuation.logprobs == pytest.approx(whole.logprobs[6:], abs=1e-5)


@pytest.mark.parametrize(
    ("family", "deterministic"), [("qwen3", True), *((name, False) for name in ("qwen3", *OTHER_MODELS))]
)
@pytest.mark.slow
def test_logprobs_are_those_of_transformers(
    open_scheduler: OpenScheduler, tmp_path: Path, family: str, deterministic: bool
) -> None:
    path = {"qwen3": write_tiny_qwen3, **OTHER_MODELS}[family](tmp_path)
    model = load_causal_lm(str(path), dtype=torch.float32, attn_implementation="eager")
    scheduler = open_scheduler(path=path, deterministic=deterministic)
    order = list(range(len(specs())))
    for i, answers in submit_in_order(scheduler, order).items():
        spec = specs()[i]
        temperature = spec["temperature"] or 1.0
        for output_ids, logprobs in answers:
            ids = torch.tensor([[*spec["input_ids"], *output_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(spec["input_ids"]) - 1 : -1]
            # The end token has probability 0 for the first min_new_tokens tokens.
            logits[: spec.get("min_new_tokens", 0), EOS_ID] = -torch.inf
            expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(output_ids)[:, None])[:, 0]
            assert torch.tensor(logprobs) == pytest.approx(expected, abs=1e-5)
            if spec["temperature"] == 0:
                assert output_ids == logits.argmax(-1).tolist()
