"""The client of the engines of a judge, against servers with SGLang's answers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlscale.config import ModelBuild, ModelConfig
from rlscale.models.hf_models import load_tokenizer
from rlscale.models.tiny import build_model
from rlscale.rewards.judge_client import JudgeClient, JudgeError, JudgeSpec
from rlscale.types import EngineAddress

Handler = Callable[[web.Request], Awaitable[web.Response]]
MESSAGES = [{"role": "user", "content": "hi"}]


async def serve(path: str, handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post(path, handler)
    server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    return server, f"http://127.0.0.1:{server.addresses[0][1]}"


def client(*urls: str, model_path: str = "", is_embedding: bool = False) -> JudgeClient:
    addresses = [EngineAddress(name=f"reward engine {i}", url=url, api_key="key") for i, url in enumerate(urls)]
    return JudgeClient(JudgeSpec(addresses=tuple(addresses), model_path=model_path, is_embedding=is_embedding))


async def with_server(path: str, answer: Any, ask: Callable[[str], Awaitable[Any]], *, status: int = 200) -> Any:
    """What `ask` returns of a URL, and the bodies and keys of the requests."""
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers["Authorization"]))
        return web.json_response(answer, status=status)

    server, url = await serve(path, handle)
    try:
        return await ask(url), seen
    finally:
        await server.cleanup()


def test_a_text_is_sent_as_it_is() -> None:
    async def ask(url: str) -> str:
        return await client(url).generate("2+2=", max_new_tokens=3, top_p=0.5)

    found, seen = asyncio.run(with_server("/generate", {"text": "4", "meta_info": {}}, ask))
    params = {"max_new_tokens": 3, "temperature": 0.0, "top_p": 0.5}
    assert (found, seen) == ("4", [({"text": "2+2=", "sampling_params": params}, "Bearer key")])


def test_messages_get_the_chat_template_of_the_judge(tmp_path: Path) -> None:
    model_path = str(build_model(ModelConfig(build=ModelBuild.tiny_qwen3, num_layers=1), tmp_path))

    async def ask(url: str) -> str:
        return await client(url, model_path=model_path).generate(MESSAGES)

    _, seen = asyncio.run(with_server("/generate", {"text": "4"}, ask))
    assert load_tokenizer(model_path).decode(seen[0][0]["input_ids"]) == "<|user|>hi<|assistant|>"


def test_a_reward_model_gives_numbers() -> None:
    async def ask(url: str) -> list[float]:
        return await client(url, is_embedding=True).score(["a", "b"])

    answer = [{"embedding": [0.5], "meta_info": {}}, {"embedding": [-2], "meta_info": {}}]
    assert asyncio.run(with_server("/classify", answer, ask))[0] == [0.5, -2.0]
    with pytest.raises(JudgeError, match=r"reward engine 0 must answer with 2 numbers, got \[\{"):
        asyncio.run(with_server("/classify", answer[:1], ask))


def test_the_wrong_kind_of_model_is_named() -> None:
    with pytest.raises(JudgeError, match=r"is a reward model; call judge.score"):
        asyncio.run(client("http://h", is_embedding=True).generate("a"))
    with pytest.raises(JudgeError, match=r"is no reward model; set reward.engine.is_embedding=true"):
        asyncio.run(client("http://h").score(["a"]))


def test_a_refusal_is_an_error_without_the_key() -> None:
    async def ask(url: str) -> str:
        return await client(url).generate("a")

    with pytest.raises(JudgeError, match=r"^reward engine 0 refused /generate with status 400: .*too long") as caught:
        asyncio.run(with_server("/generate", {"error": {"message": "too long"}}, ask, status=400))
    assert "key" not in str(caught.value)


def test_requests_go_to_the_engine_with_the_fewest_and_past_a_dead_one() -> None:
    async def run() -> list[int]:
        counts, both, gone = [0, 0], asyncio.Event(), await serve("/generate", never)
        await gone[0].cleanup()

        def handler(index: int) -> Handler:
            async def handle(request: web.Request) -> web.Response:
                counts[index] += 1
                if sum(counts) == 4:
                    both.set()
                await both.wait()  # so that all four are open at once
                return web.json_response({"text": "x"})

            return handle

        servers = [await serve("/generate", handler(index)) for index in range(2)]
        judge = client(gone[1], *[url for _, url in servers])
        await asyncio.gather(*[judge.generate("a") for _ in range(4)])
        for server, _ in servers:
            await server.cleanup()
        return counts

    assert sum(asyncio.run(run())) == 4


async def never(request: web.Request) -> web.Response:
    raise AssertionError("this server has ended")


def test_a_request_waits_for_the_new_address_of_a_restarted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlscale.rewards.judge_client.RETRY_S", 0.01)

    async def run() -> str:
        gone, old_url = await serve("/generate", never)
        await gone.cleanup()
        judge = client(old_url)
        asking = asyncio.create_task(judge.generate("a"))
        await asyncio.sleep(0)

        async def handle(request: web.Request) -> web.Response:
            return web.json_response({"text": "back"})

        server, url = await serve("/generate", handle)
        judge.set_addresses([EngineAddress(name="reward engine 0", url=url)])
        found = await asking
        await server.cleanup()
        return found

    assert asyncio.run(run()) == "back"


def with_reference(url: str) -> JudgeClient:
    """A client of a run that has one further model and no `reward.engine`."""
    address = EngineAddress(name="ref engine 0", url=url, api_key="key")
    further = {"ref": JudgeSpec(addresses=(address,), model_path="")}
    return JudgeClient(JudgeSpec(addresses=(), model_path="", further=further))


def test_a_further_model_is_asked_by_its_name() -> None:
    async def ask(url: str) -> Any:
        return await with_reference(url).model("ref").request("/generate", {"text": "1", "return_logprob": True})

    answer = {"text": "4", "meta_info": {"output_token_logprobs": []}}
    found, seen = asyncio.run(with_server("/generate", answer, ask))
    assert (found, seen) == (answer, [({"text": "1", "return_logprob": True}, "Bearer key")])


def test_a_model_that_the_run_does_not_have_is_named() -> None:
    with pytest.raises(JudgeError, match=r"must name a frozen model of sglang.config \(ref\), got reference"):
        with_reference("http://127.0.0.1:1").model("reference")
    with pytest.raises(JudgeError, match=r"the run has no reward\.engine; ask one of its further models"):
        asyncio.run(with_reference("http://127.0.0.1:1").generate("a"))


def test_a_restarted_engine_of_a_further_model_has_its_new_address() -> None:
    async def ask(url: str) -> str:
        judge = with_reference("http://127.0.0.1:1")
        judge.set_addresses([EngineAddress(name="ref engine 0", url=url, api_key="key")], "ref")
        return await judge.model("ref").generate("a")

    assert asyncio.run(with_server("/generate", {"text": "back"}, ask))[0] == "back"
    address = EngineAddress(name="ref engine 0", url="http://127.0.0.1:2")
    before = JudgeSpec(addresses=(), model_path="", further={"ref": JudgeSpec(addresses=(), model_path="m")})
    after = before.with_addresses([address], "ref")
    assert after.further["ref"] == JudgeSpec(addresses=(address,), model_path="m") and after.addresses == ()
    assert before.with_addresses([address], None).addresses == (address,)
