"""The client of a judge on real SGLang: texts, and numbers of a reward model as transformers computes them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.rewards.judge_client import JudgeClient, JudgeError, JudgeSpec
from rlscale.types import EngineAddress
from tests.contract.conftest import Target, sglang_launch
from tests.tiny_model import write_tiny_qwen3, write_tiny_reward_model

pytestmark = pytest.mark.slow

TEXTS = ["2+2=4", "no", "a_longer_text"]


@contextmanager
def open_reward_model(folder: Path, model: Path) -> Iterator[JudgeClient]:
    address, process = replace(sglang_launch(model), server_args={"is_embedding": True}).open(folder)
    process.start()
    try:
        process.wait_ready(timeout_s=300)
        yield JudgeClient(JudgeSpec(addresses=(address,), model_path=str(model), is_embedding=True))
    finally:
        process.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_reward_model_gives_the_numbers_of_transformers(tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write_tiny_reward_model(tmp_path / "model", family=family)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = [model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in TEXTS]
    with open_reward_model(tmp_path, folder) as judge:
        found = asyncio.run(judge.score(TEXTS))
    assert found == pytest.approx(expected, abs=1e-3)
    assert len(set(expected)) == len(TEXTS)


def test_a_judge_generates_for_texts_and_messages(sglang: Target, tmp_path: Path) -> None:
    model = write_tiny_qwen3(tmp_path / "model")  # that of the server
    judge = JudgeClient(JudgeSpec(addresses=(EngineAddress(name="engine 0", url=sglang.url),), model_path=str(model)))

    async def ask() -> list[str]:
        messages = [{"role": "user", "content": "2+2="}]
        both = [judge.generate("2+2=", max_new_tokens=8), judge.generate(messages, max_new_tokens=8)]
        with pytest.raises(JudgeError, match="refused /generate with status 400"):
            await judge.generate("x" * 4000, max_new_tokens=8)
        return list(await asyncio.gather(*both))

    plain, templated = asyncio.run(ask())
    # The tokenizer of this model has no chat template.
    assert plain == templated != ""
