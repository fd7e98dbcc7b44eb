"""Text through the middleware router and its cache, in front of every engine: tokens are those that it generated."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlscale.config import RouterConfig
from rlscale.engines.middleware_router.middleware_launch import MiddlewareRouterLaunch
from rlscale.models.hf_models import load_tokenizer
from rlscale.types import EngineAddress
from tests.contract.conftest import Target
from tests.tiny_model import write_tiny_qwen3

pytestmark = pytest.mark.timeout(300)

CACHE = "rlscale.engines.middleware_router.radix_tree_middleware:RadixTreeMiddleware"
READY_S = 120
PROMPT = "1+1="
# The model also generates tokens that its tokenizer never makes of a text.
SAMPLING = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}


@pytest.fixture
def router(target: Target, tmp_path: Path) -> Iterator[str]:
    """URL of a router in front of the engine."""
    with ExitStack() as stack:
        config = RouterConfig(timeout_s=60, max_connections=64, health_check_interval_s=1, middleware_paths=[CACHE])
        launch = MiddlewareRouterLaunch(config=config, model_path=str(write_tiny_qwen3(tmp_path / "model")))
        _, process = launch.open(tmp_path / "logs", [EngineAddress(name="engine 0", url=target.url)])
        process.start()
        stack.callback(process.stop)
        process.wait_ready(READY_S)
        yield process.url


async def post(url: str, body: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def test_a_conversation_in_text_keeps_its_tokens(target: Target, router: str, tmp_path: Path) -> None:
    if target.kind == "scripted":
        pytest.skip("the answers of a script are texts, which the tokenizer cuts in one way")
    tokenizer = load_tokenizer(str(tmp_path / "model"))

    async def converse() -> tuple[list[int], list[float], str]:
        text, ids, logprobs = PROMPT, list(tokenizer.encode(PROMPT)), [0.0] * len(PROMPT)
        for turn in range(3):
            body = {"text": text, "sampling_params": {**SAMPLING, "sampling_seed": turn}}
            answer = await post(f"{router}/generate", body)
            assert answer["meta_info"]["prompt_tokens"] == len(ids), "the engine read other tokens than it generated"
            entries = answer["meta_info"]["output_token_logprobs"]
            assert [entry[1] for entry in entries] == answer["output_ids"]
            ids += [*answer["output_ids"], *tokenizer.encode("?")]
            logprobs += [*(entry[0] for entry in entries), 0.0]
            text += tokenizer.decode(answer["output_ids"]) + "?"
        return ids, logprobs, text

    ids, logprobs, text = asyncio.run(converse())
    found = asyncio.run(post(f"{router}/retrieve_from_text", {"text": text}))
    assert found["tokens"] == ids and found["rollout_logp"] == logprobs
    assert sum(found["loss_mask"]) == 3 * 40
    assert set(found["weight_versions"]) == {None, 0}
    assert list(tokenizer.encode(text)) != ids, "the test needs a text that the tokenizer cuts in another way"
