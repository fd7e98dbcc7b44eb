"""Logprobs of given tokens, which a teacher of distillation is asked for: SGLang's input logprobs."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from rlscale.config import load_config
from rlscale.driver.open_teachers import find_other_tokenizers, find_unusable_servers
from rlscale.engines.client.teacher_client import TeacherClient
from rlscale.errors import EngineError
from rlscale.models.hf_models import load_causal_lm, load_tokenizer
from rlscale.models.resolve_model import resolve_model
from rlscale.types import EngineAddress
from tests.contract.conftest import OPENERS, Target, Wire, open_embedded
from tests.tiny_model import FAMILIES, VOCAB_SIZE, write_tiny, write_tiny_qwen3

TOKENS = [4, 7, 5, 9, 3, 8, 6, 4, 10, 7, 5]


OTHER_FAMILIES = {name: partial(open_embedded, write=partial(write_tiny, family=name)) for name in FAMILIES}
IN_CI = ("deepseek_v3", "gpt_oss")
SERVERS = [
    "embedded",
    *(pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.nightly]) for name in OTHER_FAMILIES),
    pytest.param("sglang", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Path]]:
    """A server that scores, and the folder of its model."""
    folder = tmp_path_factory.mktemp("scoring")
    if request.param == "sglang":
        # The server that other tests use has the same weights.
        yield request.getfixturevalue("sglang"), write_tiny_qwen3(folder / "model")
        return
    with {**OPENERS, **OTHER_FAMILIES}[request.param](folder) as target:
        yield target, folder / "model"


@pytest.fixture(scope="module")
def scoring(served: tuple[Target, Path]) -> Target:
    return served[0]


def client(target: Target, *, num_top: int = 0) -> TeacherClient:
    return TeacherClient(EngineAddress(name="teacher", url=target.url), timeout_s=60, num_top=num_top)


@pytest.fixture
def expected_logprobs(served: tuple[Target, Path]) -> torch.Tensor:
    """By transformers, of the token after each of `TOKENS`. [T, V]"""
    model = load_causal_lm(str(served[1]), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([TOKENS])).logits[0], dim=-1)


@pytest.mark.parametrize("start", [1, 6, len(TOKENS) - 1])
async def test_logprobs_are_those_of_the_model(scoring: Target, expected_logprobs: torch.Tensor, start: int) -> None:
    teacher = client(scoring)
    scores = await teacher.score(TOKENS, start=start)
    await teacher.close()
    # Row t of the model is the distribution of token t + 1.
    expected = expected_logprobs[start - 1 : -1].gather(1, torch.tensor(TOKENS[start:])[:, None])[:, 0]
    np.testing.assert_allclose(scores.logprobs, expected.numpy(), atol=1e-5)
    assert scores.top_ids is None


@pytest.mark.parametrize("num_top", [4, VOCAB_SIZE])
async def test_top_logprobs_are_the_most_likely(scoring: Target, expected_logprobs: torch.Tensor, num_top: int) -> None:
    teacher = client(scoring, num_top=num_top)
    scores = await teacher.score(TOKENS, start=3)
    await teacher.close()
    values, _ = expected_logprobs[2:-1].topk(num_top, dim=-1)
    assert scores.top_ids is not None and scores.top_logprobs is not None
    np.testing.assert_allclose(scores.top_logprobs, values.numpy(), atol=1e-5)
    # Ties may be in any order; each id has its own logprob.
    own = expected_logprobs[2:-1].gather(1, torch.from_numpy(scores.top_ids).long())
    np.testing.assert_allclose(scores.top_logprobs, own.numpy(), atol=1e-5)


async def test_scores_do_not_depend_on_other_requests(scoring: Target) -> None:
    import asyncio

    teacher = client(scoring)
    alone = await teacher.score(TOKENS, start=2)
    others = [teacher.score(TOKENS[:length], start=1) for length in range(2, len(TOKENS))]
    together, *_ = await asyncio.gather(teacher.score(TOKENS, start=2), *others)
    await teacher.close()
    np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=1e-5)


async def test_a_text_is_encoded(scoring: Target) -> None:
    teacher = client(scoring)
    ids = await teacher.encode("12")
    await teacher.close()
    assert len(ids) == 2 and ids[0] != ids[1]


async def test_a_long_prompt_is_refused_with_a_status(scoring: Target) -> None:
    teacher = client(scoring)
    with pytest.raises(EngineError, match="refused with status 400") as refused:
        await teacher.score([4] * (scoring.max_context_len + 1), start=1)
    await teacher.close()
    assert refused.value.is_refusal


def test_a_teacher_with_another_tokenizer_is_refused_by_name(
    scoring: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = load_tokenizer(str(write_tiny_qwen3(tmp_path_factory.mktemp("own") / "model")))
    config = load_config(["algo.opd_kl_coef=1.0", f"model.teacher_url={scoring.url}", "reward.type=random"])
    assert find_unusable_servers(config) == [] == find_other_tokenizers(config, own, vocab_size=VOCAB_SIZE)
    full = load_config(["algo.opd_kl_coef=1.0", "algo.opd_kl=full", f"model.teacher_url={scoring.url}"])
    assert not find_other_tokenizers(full, own, vocab_size=VOCAB_SIZE)
    if scoring.kind != "sglang":  # it does not report the size of its vocabulary
        [problem] = find_other_tokenizers(full, own, vocab_size=VOCAB_SIZE + 1)
        assert f"(it has {VOCAB_SIZE} tokens, the policy {VOCAB_SIZE + 1})" in str(problem)
    other = load_tokenizer(resolve_model(config.model))
    [problem] = find_other_tokenizers(config, other, vocab_size=len(other))
    expected = f"model.teacher_url must name a teacher with the tokenizer of the policy, got {scoring.url} (it "
    assert str(problem).startswith(expected) and str(problem).endswith(
        "; use a teacher of the same model family, which has the same token ids"
    )


def test_a_teacher_that_does_not_answer_is_reported() -> None:
    config = load_config(["algo.opd_kl_coef=1.0", "model.teacher_url=http://127.0.0.1:9", "reward.type=random"])
    [problem] = find_unusable_servers(config)
    assert str(problem).startswith("model.teacher_url must name a server that responds, got http://127.0.0.1:9 (")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {"logprob_start_len": 0, "return_logprob": True, "sampling_params": {"max_new_tokens": 2}},
            "logprob_start_len",
        ),
        (
            {"logprob_start_len": 3, "return_logprob": True, "sampling_params": {"max_new_tokens": 0}},
            "logprob_start_len",
        ),
        ({"logprob_start_len": "0"}, "logprob_start_len"),
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        (
            {
                "logprob_start_len": 0,
                "return_logprob": True,
                "top_logprobs_num": VOCAB_SIZE + 1,
                "sampling_params": {"max_new_tokens": 0},
            },
            "top_logprobs_num",
        ),
    ],
)
async def test_what_the_embedded_engine_cannot_return_is_refused(
    scoring: Target, body: dict[str, object], field: str
) -> None:
    if scoring.kind == "sglang":
        pytest.skip("SGLang accepts more")
    async with aiohttp.ClientSession() as session:
        status, answer = await Wire(scoring, session).post("/generate", {"input_ids": [4, 7, 5], **body})
    assert status == 400 and answer["error"]["field"] == field
