"""An engine whose answers are scripted as texts of the tiny models' format, and a gateway in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlscale.engines.fake import FakeServer
from rlscale.engines.server.generate_request import Answer, GenerateRequest, VersionSpan
from rlscale.gateway.codec import Codec
from rlscale.gateway.gateway_process import GatewayLaunch, GatewayProcess
from rlscale.models.agent_tokenizer import agent_tokenizer
from rlscale.renderers.families import AUTO, make_renderer
from tests.gateway_fixtures import EngineEntry, LoggedFake

MAX_LENGTH = 32_768

Script = Callable[[str], str]
"""Text of an answer, such as `<|call|>add 1 2`, to the text of a request."""


def build_codec() -> Codec:
    """The renderer of `tiny_qwen3_agent`."""
    tokenizer = agent_tokenizer(MAX_LENGTH)
    return Codec(renderer=make_renderer(AUTO, tokenizer), decode=tokenizer.decode)


@contextmanager
def scripted_engine(script: Script) -> Iterator[LoggedFake]:
    """An engine on loopback with a log of its tokens; each answer ends with the end token."""
    tokenizer = agent_tokenizer(MAX_LENGTH)
    with FakeServer(vocab_size=len(tokenizer), max_context_len=MAX_LENGTH) as server:
        logged = LoggedFake(server)

        async def generate(request: GenerateRequest) -> list[Answer]:
            text = script(tokenizer.decode(list(request.input_ids)))
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            ids = ids[: request.params.max_new_tokens]
            is_cut = ids[-1] != tokenizer.eos_token_id
            logprobs = [-(1 + each % 7) / 8 for each in ids]
            finish: dict[str, Any] = {"type": "length", "length": len(ids)} if is_cut else {"type": "stop"}
            span = VersionSpan(version="0", start=0, end=len(ids))
            answer = Answer(output_ids=ids, logprobs=logprobs, spans=[span], finish_reason=finish, weight_version="0")
            entry = EngineEntry(tuple(request.input_ids), tuple(ids), tuple(logprobs), request.params.temperature)
            logged.entries += [entry] * request.n
            return [answer] * request.n

        def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

        server.service.generate = generate  # type: ignore[method-assign]
        server.service.decode = decode  # type: ignore[method-assign]
        yield logged


@contextmanager
def scripted_gateway(folder: Path, engine: LoggedFake) -> Iterator[GatewayProcess]:
    """The gateway in a separate process."""
    launch = GatewayLaunch(
        folder=folder / "sessions",
        log_folder=folder / "logs",
        model="policy",
        codec={"factory": "tests.scripted_engine:build_codec", "arguments": {}},
    )
    process = GatewayProcess(launch, [engine.address])
    try:
        process.start()
        yield process
    finally:
        process.stop()
