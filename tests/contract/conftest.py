"""Servers under test in the contract suite. Another server is one more entry in `OPENERS`."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlscale.config.groups.rollout import SGLANG_SPARE_TOKENS
from rlscale.config.passthrough.recorded import DESCRIBE
from rlscale.config.passthrough.sglang_args import CLASSES, DISTRIBUTION
from rlscale.config.passthrough.sglang_python import check_python, find_python
from rlscale.engines.fake import FakeServer
from rlscale.engines.launch_sglang import SglangLaunch, SglangLora
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.expert_routes import RouteShape
from rlscale.weights.receiver import EngineReceiver
from tests.tiny_model import MAX_CONTEXT_LEN, VOCAB_SIZE, write_tiny_qwen3

WriteModel = Callable[[Path], Path]
"""Writes a model into a folder and returns it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server under test."""

    kind: str
    url: str
    vocab_size: int
    max_context_len: int
    long_answer: int  # number of tokens that leave time for an interruption
    has_min_p: bool = True  # together with a seed
    keeps_retracted: bool = True  # the tokens of a retracted request that is then aborted
    refuses_by_name: bool = True  # every bad request, with status 400 and the name of the field
    splits_seeds: bool = True  # sample j of n is drawn with seed + j
    spare_tokens: int = 0  # that a server reserves of its context
    counts_held: bool = True  # a request that arrives in a pause is a waiting one in its load
    batch_invariant: bool = True  # logprobs are the same to the last bit, whatever else is being decoded


class Wire:
    """A plain HTTP client: the contract covers the HTTP API, not HttpEngine."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self.target, self._session = target, session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.target.url + path) as response:
            return response.status, await _content(response)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._session.post(self.target.url + path, json=body) as response:
            return response.status, await _content(response)

    async def stream(self, body: Any) -> AsyncIterator[Any]:
        """Yields the events of a streaming `/generate`, and "[DONE]" at the end."""
        async with self._session.post(self.target.url + "/generate", json={**body, "stream": True}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            rest = b""
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    assert event.startswith(b"data: ")
                    data = event.removeprefix(b"data: ").decode()
                    yield data if data == "[DONE]" else json.loads(data)
            assert rest == b""

    async def generate(self, input_ids: list[int], **sampling: Any) -> Any:
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer


async def _content(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


@contextmanager
def open_fake(folder: Path, *, routes: RouteShape | None = None) -> Iterator[Target]:
    with FakeServer(
        vocab_size=VOCAB_SIZE,
        max_context_len=MAX_CONTEXT_LEN,
        token_s=0.002,
        receiver=EngineReceiver(),
        routes=routes,
    ) as fake:
        yield Target(
            kind="fake",
            url=fake.url,
            vocab_size=VOCAB_SIZE,
            max_context_len=MAX_CONTEXT_LEN,
            long_answer=200,
            has_min_p=False,  # it draws from no distribution
        )


@contextmanager
def open_scripted(folder: Path) -> Iterator[Target]:
    model, port = write_tiny_qwen3(folder / "model"), free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlscale.cli.serve_script", f"--model-path={model}"]
    command += [f"--port={port}", "--script=tests.contract.scripted_answers:answer", "--token-s=0.002"]
    process = EngineProcess(command, name="engine 0", url=url, env=os.environ, log_path=folder / "server.log")
    process.start()
    try:
        process.wait_ready(timeout_s=60)
        yield Target(
            kind="scripted",
            url=url,
            vocab_size=VOCAB_SIZE,
            max_context_len=MAX_CONTEXT_LEN,
            long_answer=250,
            has_min_p=False,  # it draws from no distribution
        )
    finally:
        process.stop()


@contextmanager
def open_embedded(folder: Path, *, write: WriteModel = write_tiny_qwen3) -> Iterator[Target]:
    model = write(folder / "model")
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={model}", f"--port={port}", "--num-threads=1"]
    process = EngineProcess(command, name="engine 0", url=url, env=os.environ, log_path=folder / "server.log")
    process.start()
    try:
        process.wait_ready(timeout_s=60)
        yield Target(kind="embedded", url=url, vocab_size=VOCAB_SIZE, max_context_len=MAX_CONTEXT_LEN, long_answer=250)
    finally:
        process.stop()


@contextmanager
def open_sglang(
    folder: Path,
    *,
    write: WriteModel = write_tiny_qwen3,
    returns_routes: bool = False,
    lora: SglangLora | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Iterator[Target]:
    """A real SGLang server with the arguments of a run, drawing by seed."""
    if problems := check_python(None, serves=True, routes=True, on_cpu=True):
        pytest.fail("\n".join(map(str, problems)))
    launch = replace(sglang_launch(write(folder / "model")), returns_routes=returns_routes, lora=lora)
    if arguments is not None:
        launch = replace(launch, server_args=arguments)
    address, process = launch.open(folder)
    process.start()
    try:
        process.wait_ready(timeout_s=300)
        yield Target(
            kind="sglang",
            url=address.url,
            vocab_size=VOCAB_SIZE,
            max_context_len=MAX_CONTEXT_LEN,
            long_answer=400,
            has_min_p=False,
            keeps_retracted=False,
            refuses_by_name=False,
            splits_seeds=False,
            spare_tokens=SGLANG_SPARE_TOKENS,
            counts_held=False,
            batch_invariant=False,
        )
    finally:
        process.stop()


SGLANG_ARGUMENTS = {"enable_deterministic_inference": True}  # without it seeds are ignored


def sglang_launch(model: Path) -> SglangLaunch:
    return SglangLaunch(
        name="engine 0",
        model_path=str(model),
        dtype="float32",
        device="cpu",
        max_context_len=None,
        num_threads=1,
        seed=0,
        python=find_python(None),
        server_args=SGLANG_ARGUMENTS,
    )


def describe_installed(classes: Sequence[str] = CLASSES) -> Any:
    """The output of describe.py in the interpreter that has SGLang."""
    command = [str(find_python(None)), str(DESCRIBE), DISTRIBUTION, *classes]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


OPENERS: dict[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "embedded": open_embedded,
    "fake": open_fake,
    "scripted": open_scripted,
    "sglang": open_sglang,
}
# The real server needs a separate environment and half a minute to start.
TARGETS = [pytest.param(kind, marks=[pytest.mark.slow] if kind == "sglang" else []) for kind in OPENERS]


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One real server for all tests: a test that changes its weights restores them."""
    with open_sglang(tmp_path_factory.mktemp("sglang")) as opened:
        yield opened


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    if request.param == "sglang":
        yield request.getfixturevalue("sglang")
        return
    with OPENERS[request.param](tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.fixture
async def wire(target: Target) -> AsyncIterator[Wire]:
    async with aiohttp.ClientSession() as session:
        yield Wire(target, session)
