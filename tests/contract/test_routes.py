"""Routes (the experts of each token) in responses, the same for every server."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import fake_routes
from rlscale.expert_routes import RouteShape
from rlscale.types import EngineAddress, SamplingParams
from tests.contract.conftest import Target, Wire, open_embedded, open_fake, open_sglang
from tests.tiny_model import write_tiny, write_tiny_qwen3_moe

SHAPE = RouteShape(num_layers=2, num_chosen=2, num_experts=4)
PROMPT = [5, 9, 33, 7, 60, 2]
OPENERS: dict[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "embedded": partial(open_embedded, write=write_tiny_qwen3_moe),
    "gpt_oss": partial(open_embedded, write=partial(write_tiny, family="gpt_oss")),
    "fake": partial(open_fake, routes=SHAPE),
    "sglang": partial(open_sglang, write=write_tiny_qwen3_moe, returns_routes=True),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.nightly] if kind == "sglang" else []) for kind in OPENERS],
)
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Path]]:
    """A server whose model has experts, and the folder of that model."""
    folder = tmp_path_factory.mktemp(request.param)
    with OPENERS[request.param](folder) as opened:
        yield opened, folder / "model"


@pytest.fixture
async def experts(routed: tuple[Target, Path]) -> AsyncIterator[Wire]:
    async with aiohttp.ClientSession() as session:
        yield Wire(routed[0], session)


async def generate(wire: Wire, *, rid: str | None = None, **params: Any) -> Any:
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3, **params}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
    status, answer = await wire.post("/generate", body if rid is None else {**body, "rid": rid})
    assert status == 200, answer
    return answer


def routes_of(answer: Any) -> npt.NDArray[np.int32]:
    raw = base64.b64decode(answer["meta_info"]["routed_experts"])
    return np.frombuffer(raw, dtype=np.int32).reshape(-1, SHAPE.num_layers, SHAPE.num_chosen)


def expected(routed: tuple[Target, Path], tokens: list[int]) -> npt.NDArray[Any]:
    """The experts of each token in transformers (or of the fake), in ascending order."""
    if routed[0].kind == "fake":
        return np.sort(fake_routes(tokens, SHAPE), axis=-1)
    model = AutoModelForCausalLM.from_pretrained(routed[1])
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    expert_ids = [each.topk(SHAPE.num_chosen, dim=-1).indices.sort(dim=-1).values for each in logits]
    return torch.stack(expert_ids, dim=1).numpy()


async def wait_until_running(wire: Wire, task: "asyncio.Task[Any]") -> None:
    """Returns when the server runs the request or has finished it."""
    while not task.done() and not (await wire.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"]:
        await asyncio.sleep(0.005)


async def test_every_input_token_has_a_route(experts: Wire, routed: tuple[Target, Path]) -> None:
    assert (await experts.get("/server_info"))[1]["enable_return_routed_experts"] is True
    answer = await generate(experts)
    tokens = [*PROMPT, *answer["output_ids"]]
    routes = routes_of(answer)
    assert len(routes) == len(tokens) - 1
    assert (np.sort(routes, axis=-1) == expected(routed, tokens[:-1])).all()
    again = await generate(experts)
    assert (routes_of(again) == routes).all(), "a cached prompt has the same routes"


async def test_each_of_n_answers_has_separate_routes(experts: Wire, routed: tuple[Target, Path]) -> None:
    for answer in await generate(experts, n=2):
        tokens = [*PROMPT, *answer["output_ids"]]
        assert (np.sort(routes_of(answer), axis=-1) == expected(routed, tokens[:-1])).all()


async def test_routes_only_on_request(experts: Wire) -> None:
    assert "routed_experts" not in (await experts.generate(PROMPT, max_new_tokens=2))["meta_info"]


async def test_a_stream_ends_with_routes(experts: Wire) -> None:
    sampling = {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True}
    events = [event async for event in experts.stream(body)]
    *growing, last = events[:-1]
    assert len(routes_of(last)) == len(PROMPT) + 4
    assert not any(event["meta_info"].get("routed_experts") for event in growing)


async def test_an_aborted_answer_has_routes_of_its_input_tokens(experts: Wire) -> None:
    task = asyncio.create_task(generate(experts, rid="routed", max_new_tokens=experts.target.long_answer))
    await wait_until_running(experts, task)
    assert (await experts.post("/abort_request", {"rid": "routed"}))[0] == 200
    answer = await task
    if answer["output_ids"]:  # otherwise it was aborted before its prompt was computed, and may have no routes
        assert len(routes_of(answer)) == len(PROMPT) + len(answer["output_ids"]) - 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_loses_no_routes(experts: Wire, routed: tuple[Target, Path], mode: str) -> None:
    task = asyncio.create_task(generate(experts, max_new_tokens=experts.target.long_answer))
    await wait_until_running(experts, task)
    assert (await experts.post("/pause_generation", {"mode": mode}))[0] == 200
    assert (await experts.post("/continue_generation", {}))[0] == 200
    answer = await task
    tokens = [*PROMPT, *answer["output_ids"]]
    assert (np.sort(routes_of(answer), axis=-1) == expected(routed, tokens[:-1])).all()


async def test_the_client_decodes_routes(routed: tuple[Target, Path]) -> None:
    engine = HttpEngine(EngineAddress(name="engine 0", url=routed[0].url), timeout_s=60)
    params = SamplingParams(max_new_tokens=7, sampling_seed=5, ignore_eos=True, routes=SHAPE)
    try:
        answers = await engine.generate(PROMPT, params, n=2)
    finally:
        await engine.close()
    for answer in answers:
        assert answer.routes is not None and answer.routes.dtype == np.uint8
        wanted = expected(routed, [*PROMPT, *answer.output_ids][:-1])
        assert (np.sort(answer.routes, axis=-1) == wanted).all()


async def test_a_model_without_experts_refuses_routes(wire: Wire) -> None:
    if wire.target.kind == "sglang":
        pytest.skip("this server accepts the option and ignores it")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
    status, answer = await wire.post("/generate", body)
    assert status == 400 and "return_routed_experts must be false" in answer["error"]["message"]
