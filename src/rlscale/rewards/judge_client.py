"""Client of the engines of frozen models: the object that rewards get as `judge`, and user code for a model's name.

    reward process ── /generate ──> the engine with the fewest requests of this process   (a judge)
                   └─ /classify ──> the same                                             (a reward model)

An engine that cannot be reached is tried again, among the others, until the deadline of the reward: the run restarts a
dead engine, and sends its new address to the processes of rewards.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from rlscale.tcp_keepalive import open_socket
from rlscale.types import EngineAddress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETRY_S = 1.0
"""Wait after no engine could be reached."""

MAX_SHOWN = 300
_logger = logging.getLogger(__name__)


class JudgeError(Exception):
    """An engine of a frozen model refused a request or gave no usable answer, or there is no such model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSpec:
    """Engines of frozen models, as a process of rewards gets them."""

    addresses: tuple[EngineAddress, ...]  # of `reward.engine`; empty: the run has only further models
    model_path: str  # of the tokenizer
    is_embedding: bool = False
    max_concurrency: int = 1024  # open requests of one process
    further: Mapping[str, "JudgeSpec"] = field(default_factory=dict)  # models of `sglang.frozen_models` by name

    def with_addresses(self, addresses: Sequence[EngineAddress], model: str | None) -> "JudgeSpec":
        """After an engine was restarted. `model`: see `JudgeClient.set_addresses`."""
        if model is None:
            return replace(self, addresses=tuple(addresses))
        changed = replace(self.further[model], addresses=tuple(addresses))
        return replace(self, further={**self.further, model: changed})


class JudgeClient:
    """Asks the engines. Calls of one event loop share connections. See `rlscale.hook_protocols.Judge`.

    Example:
        judge = JudgeClient(JudgeSpec(addresses=(address,), model_path="Qwen/Qwen3-4B"))
        text = await judge.generate([{"role": "user", "content": "Is 7 prime?"}], max_new_tokens=64)
    """

    def __init__(self, spec: JudgeSpec) -> None:
        self._spec, self._addresses = spec, spec.addresses
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._num_open: Counter[str] = Counter()  # requests by URL
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: asyncio.Future[aiohttp.ClientSession] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._further = {name: JudgeClient(each) for name, each in spec.further.items()}

    def set_addresses(self, addresses: Sequence[EngineAddress], model: str | None = None) -> None:
        """Replaces the addresses, after an engine was restarted.

        Args:
            model: name of a further model; None: the one of `reward.engine`.
        """
        if model is None:
            self._addresses = tuple(addresses)
        else:
            self._further[model].set_addresses(addresses)

    def model(self, name: str) -> "JudgeClient":
        """The client of a further model of `sglang.config`.

        Raises:
            JudgeError: there is no model of this name.
        """
        if name not in self._further:
            known = ", ".join(self._further) or "none"
            raise JudgeError(f"model must name a frozen model of sglang.config ({known}), got {name}")
        return self._further[name]

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer of an engine to a request of SGLang's API, e.g. `/generate` with `return_logprob`.

        Raises:
            JudgeError: an engine refused the request.
        """
        _, answer = await self._post(path, body)
        return answer

    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        **sampling_params: Any,
    ) -> str:
        """Returns the text that the model generates.

        Args:
            prompt: a text, or messages with `role` and `content` for the model's chat template. Without a template
                their contents are joined.
            sampling_params: further ones of SGLang, e.g. `top_p` or `stop`.

        Raises:
            JudgeError: an engine refused the request, or the model is a reward model.
        """
        if self._spec.is_embedding:
            raise JudgeError("the model of reward.engine is a reward model; call judge.score, or remove is_embedding")
        given = {"text": prompt} if isinstance(prompt, str) else await self._render(prompt)
        params = {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling_params}
        name, answer = await self._post("/generate", {**given, "sampling_params": params})
        if not isinstance(answer, Mapping) or not isinstance(answer.get("text"), str):
            raise JudgeError(f"{name} must answer with a text, got {_shorten(answer)}")
        text: str = answer["text"]
        return text

    async def score(self, texts: Sequence[str]) -> list[float]:
        """Returns the number that a reward model gives each text. Texts have the chat template already, if any.

        Raises:
            JudgeError: an engine refused the request, or the model is no reward model.
        """
        if not self._spec.is_embedding:
            raise JudgeError("the model of reward.engine is no reward model; set reward.engine.is_embedding=true")
        name, answer = await self._post("/classify", {"text": list(texts)})
        try:
            scores = [float(each["embedding"][0]) for each in answer]
        except (TypeError, KeyError, IndexError, ValueError):
            scores = []
        if len(scores) != len(texts):
            raise JudgeError(f"{name} must answer with {len(texts)} numbers, got {_shorten(answer)}")
        return scores

    async def _render(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The part of a request with the prompt. Token ids: an engine would add a second token of the beginning."""
        if self._tokenizer is None:
            # In a thread: it takes seconds.
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, self._spec.model_path)
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return {"text": "\n\n".join(each["content"] for each in messages)}
        text = tokenizer.apply_chat_template(
            [dict(each) for each in messages], tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str), "decoding one conversation gives one text"
        return {"input_ids": tokenizer.encode(text, add_special_tokens=False)}

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[str, Any]:
        """Name and answer of the engine that answered. Waits, and tries again, while none can be reached."""
        if not self._addresses:
            raise JudgeError("the run has no reward.engine; ask one of its further models: judge.model(name)")
        session = await self._open_session()
        num_rounds = 0
        while True:
            # By the requests of this process: others ask the same engines about equally.
            for address in sorted(self._addresses, key=lambda each: self._num_open[each.url]):
                self._num_open[address.url] += 1
                try:
                    return address.name, await self._send(session, address, path, body)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
                    level = logging.WARNING if num_rounds == 0 else logging.DEBUG
                    _logger.log(level, "%s cannot be reached (%s), retrying", address.name, type(error).__name__)
                finally:
                    self._num_open[address.url] -= 1
            num_rounds += 1
            await asyncio.sleep(RETRY_S)

    async def _send(
        self, session: aiohttp.ClientSession, address: EngineAddress, path: str, body: Mapping[str, Any]
    ) -> Any:
        headers = {} if address.api_key is None else {"Authorization": f"Bearer {address.api_key}"}
        async with session.post(f"{address.url.rstrip('/')}{path}", json=body, headers=headers) as reply:
            content = await reply.read()
        text = content.decode(errors="replace")
        if reply.status != 200:
            raise JudgeError(f"{address.name} refused {path} with status {reply.status}: {_shorten(text)}")
        try:
            return json.loads(text)
        except ValueError:
            raise JudgeError(f"{address.name} must answer {path} with JSON, got {_shorten(text)}") from None

    async def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._session is None:
            self._loop, self._session = loop, loop.create_future()
            self._holder = loop.create_task(self._hold_session(self._session))
        return await asyncio.shield(self._session)

    async def _hold_session(self, session: "asyncio.Future[aiohttp.ClientSession]") -> None:
        # The end of the event loop cancels this task, which closes the connections. The deadline is that of the reward.
        connector = aiohttp.TCPConnector(limit=self._spec.max_concurrency, socket_factory=open_socket)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as opened:
            session.set_result(opened)
            await asyncio.Event().wait()


def _load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    # Imported here: transformers takes seconds, and most processes of rewards need no tokenizer.
    from rlscale.models.hf_models import load_tokenizer

    return load_tokenizer(model_path)


def _shorten(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer, default=repr)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
