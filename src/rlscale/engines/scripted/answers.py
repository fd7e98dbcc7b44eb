"""Ids of a script's answers, for the service of the fake engine."""

import asyncio
import contextlib
import threading
from typing import Protocol

from rlscale.engines.scripted.script import Script, ScriptRequest
from rlscale.engines.server.generate_request import GenerateRequest, Refused

SCRIPT_TIMEOUT_S = 60.0
"""Time of one call of a script: a longer one has failed, like an exception."""


class ScriptCodec(Protocol):
    """Token ids to text and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class ScriptedAnswers:
    """Answers requests from a script.

    Example:
        answers = ScriptedAnswers(script, codec, eos_ids=frozenset({1}))
        ids = await answers.find_ids(request, index=0, seed=7)
    """

    def __init__(
        self, script: Script, codec: ScriptCodec, *, eos_ids: frozenset[int], timeout_s: float = SCRIPT_TIMEOUT_S
    ) -> None:
        assert eos_ids, "a scripted answer needs a token that ends it"
        self._script, self._codec, self._timeout_s = script, codec, timeout_s
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._codec.decode(ids, skip_special_tokens=skip_special_tokens)

    async def find_ids(self, request: GenerateRequest, *, index: int, seed: int) -> list[int]:
        """Ids of an answer, with its end.

        Raises:
            Refused: the script failed or took too long; status 500, as for any failure of an engine.
        """
        params = request.params
        script_request = ScriptRequest(
            rid=request.rid,
            index=index,
            seed=seed,
            temperature=params.temperature,
            max_new_tokens=params.max_new_tokens,
            input_ids=tuple(request.input_ids),
        )
        # With special tokens, by which a script finds the turns.
        text = self._codec.decode(list(request.input_ids), skip_special_tokens=False)
        try:
            answer = await asyncio.wait_for(_run_in_daemon(self._script, text, script_request), self._timeout_s)
        except TimeoutError as error:
            raise Refused(f"the script must answer within {self._timeout_s:g} s", status=500) from error
        except Exception as error:  # the user's function may raise anything
            raise Refused(f"the script failed: {type(error).__name__}: {error}", status=500) from error
        if not isinstance(answer, str):
            raise Refused(f"the script must return a text, got {type(answer).__name__}", status=500)
        return [*self._codec.encode(answer), min(self.eos_ids)]


async def _run_in_daemon(script: Script, text: str, request: ScriptRequest) -> object:
    """Runs a script in a thread that does not keep the process alive: the function may never return."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def finish(value: object, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value: object = None
        problem: BaseException | None = None
        try:
            value = script(text, request)
        except BaseException as error:  # an exit of the user's code must not be lost: the request would wait for ever
            problem = RuntimeError(f"{type(error).__name__}: {error}")
        # The future belongs to the event loop, which is closed where the server ended before the script.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, value, problem)

    threading.Thread(target=run, name="script", daemon=True).start()
    return await future
