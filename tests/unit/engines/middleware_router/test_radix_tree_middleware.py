"""The cache of tokens by text, in front of a scripted engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlscale.engines.middleware_router.radix_tree_middleware import RadixTreeMiddleware
from rlscale.engines.middleware_router.router_app import MiddlewareRouter
from rlscale.engines.server.http_server import Server
from rlscale.models.char_tokenizer import character_tokenizer
from tests.unit.engines.middleware_router.asgi_client import AsgiClient, make_router, opened

TOKENIZER = character_tokenizer(256)
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(str(folder))
    return str(folder)


class Engine:
    """Answers with the next of `replies`: the tokens of one answer and their versions."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.replies: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        number = body["sampling_params"].get("n", 1)
        objects = [self._object(*self.replies.pop(0)) for _ in range(number)]
        return web.json_response(objects if number > 1 else objects[0])

    @staticmethod
    def _object(ids: list[int], versions: list[int]) -> dict[str, Any]:
        return {
            "text": TOKENIZER.decode(ids, skip_special_tokens=True),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-0.25 * (i + 1), each, None] for i, each in enumerate(ids)],
                "weight_version": str(versions[-1]),
                "weight_versions": [
                    {"version": str(version), "start": i, "end": i + 1} for i, version in enumerate(versions)
                ],
            },
        }


@asynccontextmanager
async def cached(model: str, engine: Engine, *, max_staleness: int = 0) -> AsyncIterator[AsgiClient]:
    app = web.Application()
    app.add_routes([web.post("/generate", engine.generate)])
    server = Server(app, host="127.0.0.1", port=0)
    await server.start()
    given = make_router(server.url)
    router = MiddlewareRouter(given.calls, model_path=model, max_staleness=max_staleness)
    async with opened(router.build_app([RadixTreeMiddleware])) as client:
        yield client
    await server.stop()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


async def ask(client: AsgiClient, text: str, **params: Any) -> Any:
    reply = await client.call("POST", "/generate", {"text": text, "sampling_params": params})
    assert reply.status == 200
    return reply.json


async def retrieve(client: AsgiClient, text: str, **more: Any) -> dict[str, Any]:
    reply = await client.call("POST", "/retrieve_from_text", {"text": text, **more})
    assert reply.status == 200
    found: dict[str, Any] = reply.json
    return found


async def test_the_next_turn_gets_the_tokens_that_the_engine_generated(model: str) -> None:
    engine = Engine()
    engine.replies = [([*ids("2"), EOS], [3, 3]), ([*ids("4"), EOS], [3, 3])]
    async with cached(model, engine) as client:
        answer = await ask(client, "1+1=")
        assert answer["text"] == "2" and answer["output_ids"] == [*ids("2"), EOS]
        await ask(client, "1+1=2<|eos|>2+2=")
        found = await retrieve(client, "1+1=2<|eos|>2+2=4<|eos|>!")
    assert [body["input_ids"] for body in engine.bodies] == [ids("1+1="), [*ids("1+1=2"), EOS, *ids("2+2=")]]
    assert all(body["return_logprob"] and "text" not in body for body in engine.bodies)
    assert found["tokens"] == [*ids("1+1=2"), EOS, *ids("2+2=4"), EOS, *ids("!")]
    assert found["loss_mask"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert found["rollout_logp"] == [0, 0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -0.25, -0.5, 0]
    assert found["weight_versions"] == [None] * 4 + [3, 3] + [None] * 4 + [3, 3, None]
    assert found["token_length"] == found["loss_mask_length"] == 13


async def test_a_client_may_leave_out_the_end_token(model: str) -> None:
    engine = Engine()
    engine.replies = [([*ids("2"), EOS], [1, 1]), (ids("."), [1])]
    async with cached(model, engine) as client:
        await ask(client, "1+1=")
        found = await retrieve(client, "1+1=2 and")
    assert found["tokens"] == ids("1+1=2 and")
    assert found["loss_mask"] == [0, 0, 0, 0, 1, 0, 0, 0, 0]


async def test_token_ids_are_sent_as_they_are_and_cached(model: str) -> None:
    engine = Engine()
    engine.replies = [(ids("2"), [1]), (ids("3"), [1])]
    async with cached(model, engine) as client:
        body = {"input_ids": ids("1+1="), "sampling_params": {"n": 2}, "return_logprob": True, "rid": "train-1"}
        reply = await client.call("POST", "/generate", body)
        assert len(reply.json) == 2 and engine.bodies == [body]
        found = [await retrieve(client, f"1+1={answer}") for answer in "23"]
        statistics = (await client.call("GET", "/statistics")).json["radix_tree"]
    assert [each["weight_versions"] for each in found] == [[None] * 4 + [1]] * 2
    assert statistics["num_entries"] == 3 and statistics["num_hits"] == 2 and statistics["num_hit_tokens"] == 10


@pytest.mark.parametrize(("max_staleness", "is_kept"), [(0, False), (1, True)])
async def test_new_weights_remove_answers_that_are_too_old(model: str, max_staleness: int, is_kept: bool) -> None:
    engine = Engine()
    engine.replies = [(ids("2"), [4]), (ids("4"), [5])]
    async with cached(model, engine, max_staleness=max_staleness) as client:
        await ask(client, "1+1=")
        await ask(client, "2+2=")
        old, new = await retrieve(client, "1+1=2"), await retrieve(client, "2+2=4")
        newer = await retrieve(client, "1+1=2", oldest_version=5)
    assert old["loss_mask"][-1] == int(is_kept) and new["loss_mask"][-1] == 1
    assert newer["loss_mask"][-1] == 0 and newer["tokens"] == ids("1+1=2")


async def test_weights_of_an_earlier_checkpoint_remove_everything(model: str) -> None:
    engine = Engine()
    engine.replies = [(ids("2"), [7]), (ids("5"), [3]), (ids("4"), [3])]
    async with cached(model, engine) as client:
        await ask(client, "1+1=")
        await ask(client, "2+2=")
        await ask(client, "2+2=")
        found = [await retrieve(client, text) for text in ("1+1=2", "2+2=5", "2+2=4")]
    assert [each["loss_mask"][-1] for each in found] == [0, 0, 1]


async def test_an_answer_with_tokens_of_old_weights_is_not_cached(model: str) -> None:
    engine = Engine()
    engine.replies = [(ids("12"), [4, 6]), (ids("34"), [6, 6])]
    async with cached(model, engine, max_staleness=1) as client:
        await ask(client, "a")
        await ask(client, "b")
        assert (await retrieve(client, "a12"))["loss_mask"] == [0, 0, 0]
        assert (await retrieve(client, "b34"))["loss_mask"] == [0, 1, 1]


async def test_bad_requests_reach_the_engine_or_are_refused(model: str) -> None:
    engine = Engine()
    engine.replies = [(ids("2"), [1])] * 4
    async with cached(model, engine) as client:
        batch = {"input_ids": [[5], [6]], "sampling_params": {"n": 2}}
        assert (await client.call("POST", "/generate", batch)).status == 200
        assert (await client.call("POST", "/generate", raw=b"no json")).status == 500
        for body in ({"text": ""}, {"text": 3}, [], None):
            reply = await client.call("POST", "/retrieve_from_text", body)
            assert reply.status == 400 and "text must be" in reply.json["error"]["message"]
    assert engine.bodies == [batch]
