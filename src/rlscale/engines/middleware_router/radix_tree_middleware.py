"""Built-in middleware that caches tokens, logprobs and weight versions by text prefix.

A client that sends text gets the tokens that the engine has generated, not those of a tokenizer, which may cut the same
text in another way:

    POST /generate {"text": "<user>1+1=<assistant>"}           -> answer "2<eos>", tokens [8, 1]
    POST /generate {"text": "<user>1+1=<assistant>2<eos>..."}  -> the engine gets [..., 8, 1, ...]
    POST /retrieve_from_text {"text": "<user>1+1=<assistant>2<eos>"} -> tokens, logprobs, loss mask, versions
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlscale.engines.client.generate_messages import parse_generation
from rlscale.engines.middleware_router.radix_tree import PROMPT_VERSION, CachedTokens, Entry, RadixTree, collect_tokens
from rlscale.engines.middleware_router.router_app import CLIENT_CLOSED, MiddlewareRouter
from rlscale.errors import EngineError
from rlscale.models.hf_models import load_tokenizer
from rlscale.types import Generation, SamplingParams

log = logging.getLogger(__name__)

RETRIEVE_PATH = "/retrieve_from_text"
INCOMPLETE = "\ufffd"
"""Character that a tokenizer returns for a part of one; no client sends it back."""

_ANY_PARAMS = SamplingParams(max_new_tokens=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    """The prompt of a request, in the tree."""

    text: str
    entry: Entry
    num_clears: int  # of the tree, when the request was sent


class RadixTreeMiddleware:
    """Replaces the text of requests by cached tokens, and caches prompts and answers.

    Versions of the answers tell which weights the engines have: entries whose oldest token is more than
    `rollout.max_staleness` versions behind the newest one are removed. An answer that is further behind comes from a
    run that went back to an earlier checkpoint, so that all entries are removed.

    Attributes:
        max_tokens: of the cache; about 17 bytes each, and the text. A subclass may change it.
    """

    max_tokens = 8_000_000

    def __init__(self, app: ASGIApp, *, router: MiddlewareRouter) -> None:
        assert router.model_path is not None, "the run names the model"
        self._app, self._tokenizer = app, load_tokenizer(router.model_path)
        self._max_staleness, self._newest = router.max_staleness, 0
        self._special = frozenset(self._tokenizer.all_special_ids)
        self.tree = RadixTree(max_tokens=self.max_tokens)
        self.num_hits = self.num_misses = self.num_hit_tokens = 0
        router.add_route(RETRIEVE_PATH, self._retrieve)
        router.statistics["radix_tree"] = self._count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send)
            return
        prompt, sent = self._replace_text(body)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(sent)).encode())]}
        answer = _AnswerReader(send)
        await self._app(scope, _receive_first(sent, receive), answer.send)
        if prompt is not None and self.tree.num_clears == prompt.num_clears:
            for each in answer.objects():
                self._add_answer(prompt, each)

    def _find(self, text: str, *, oldest: int = 0) -> tuple[Entry | None, list[int]]:
        """The entry of the longest cached prefix of a text, and the tokenizer's tokens of the remainder."""
        found = self.tree.longest(text, oldest=oldest)
        self.num_hits += found is not None
        self.num_misses += found is None
        self.num_hit_tokens += 0 if found is None else sum(len(each.token_ids) for each in found.chain())
        remainder = text if found is None else text[found.num_chars :]
        return found, self._tokenizer.encode(remainder, add_special_tokens=False) if remainder else []

    def _tokenize(self, text: str) -> Entry:
        """The entry of a text, which may be new."""
        found, remainder = self._find(text)
        return found if found is not None and not remainder else self.tree.insert(text, remainder, base=found)

    def _replace_text(self, body: bytes) -> tuple[_Prompt | None, bytes]:
        """The prompt of a request, and the body to send; None: there is none to cache, e.g. in a batch."""
        try:
            given = json.loads(body)
        except ValueError:
            return None, body  # the engine refuses it
        if not isinstance(given, dict):
            return None, body
        text, ids = given.get("text"), given.get("input_ids")
        if isinstance(text, str) and text and ids is None:
            entry = self._tokenize(text)
            changed = {name: value for name, value in given.items() if name != "text"}
            # Answers without logprobs cannot be cached.
            changed |= {"input_ids": collect_tokens(entry).token_ids, "return_logprob": True}
            return self._prompt(text, entry), json.dumps(changed).encode()
        if text is None and isinstance(ids, list) and ids and all(isinstance(each, int) for each in ids):
            return self._add_prompt(ids), body
        return None, body

    def _prompt(self, text: str, entry: Entry) -> _Prompt:
        return _Prompt(text=text, entry=entry, num_clears=self.tree.num_clears)

    def _add_prompt(self, ids: list[int]) -> _Prompt | None:
        """Adds a prompt of token ids. It extends a cached one whose tokens are the same."""
        try:
            text = self._tokenizer.decode(ids)
        except (IndexError, OverflowError, TypeError, ValueError):
            return None  # the engine refuses ids outside its vocabulary
        if not isinstance(text, str) or not text or INCOMPLETE in text[-1]:
            return None
        base = self.tree.longest(text)
        known = [] if base is None else collect_tokens(base).token_ids
        if base is None or known != ids[: len(known)]:
            base, known = None, []
        if base is not None and len(known) == len(ids):
            return self._prompt(text, base)
        return self._prompt(text, self.tree.insert(text, ids[len(known) :], base=base))

    def _add_answer(self, prompt: _Prompt, answer: Mapping[str, Any]) -> None:
        try:
            found = parse_generation(answer, _ANY_PARAMS, prompt_len=0, endpoint="/generate", engine="engine")
        except EngineError as error:
            log.info("an answer is not cached: %s", error)
            return
        if not found.output_ids or not self._is_current(found):
            return
        ids, logprobs, versions = list(found.output_ids), list(found.logprobs), list(found.weight_versions)
        base, text, end = prompt.entry, prompt.text, len(ids)
        # Clients may continue the text with or without the token that ended it.
        if len(ids) > 1 and ids[-1] in self._special:
            end -= 1
        for first, last in ((0, end), (end, len(ids))):
            if first == last:
                continue
            text += str(self._tokenizer.decode(ids[first:last]))
            if INCOMPLETE in text[len(prompt.text) :] or len(text) == base.num_chars:
                return
            part = slice(first, last)
            base = self.tree.insert(text, ids[part], base=base, logprobs=logprobs[part], versions=versions[part])

    def _is_current(self, answer: Generation) -> bool:
        """Whether an answer may be cached; updates what is known of the engines' weights."""
        newest, oldest = max(answer.weight_versions), min(answer.weight_versions)
        if newest < self._newest - self._max_staleness:
            self.tree.clear()
            self._newest = newest
            return False  # its prompt may have tokens of the weights that are gone
        if newest > self._newest:
            self._newest = newest
            self.tree.remove_older(newest - self._max_staleness)
        return oldest >= self._newest - self._max_staleness

    async def _retrieve(self, request: Request) -> Response:
        """The tokens of a text, as slime's router returns them, with the weight version of each."""
        try:
            body = await request.json()
        except ValueError:
            body = None
        text = body.get("text") if isinstance(body, dict) else None
        if not isinstance(text, str) or not text:
            message = f"text must be a text that is not empty, got {text!r}"
            return JSONResponse({"error": {"message": message, "type": "BadRequest"}}, status_code=400)
        oldest = body.get("oldest_version")
        entry, remainder = self._find(text, oldest=oldest if isinstance(oldest, int) else 0)
        found = CachedTokens([], [], [], [], 0) if entry is None else collect_tokens(entry)
        number, num_tokens = len(remainder), len(found.token_ids) + len(remainder)
        versions = [None if each == PROMPT_VERSION else each for each in found.weight_versions]
        return JSONResponse(
            {
                "tokens": found.token_ids + remainder,
                "response": text,
                "loss_mask": found.loss_mask + [0] * number,
                "token_length": num_tokens,
                "loss_mask_length": num_tokens,
                "rollout_logp": found.logprobs + [0.0] * number,
                "weight_versions": versions + [None] * number,
            }
        )

    def _count(self) -> dict[str, int]:
        return {
            "num_entries": self.tree.num_entries,
            "num_tokens": self.tree.num_tokens,
            "num_hits": self.num_hits,
            "num_misses": self.num_misses,
            "num_hit_tokens": self.num_hit_tokens,
            "newest_version": self._newest,
        }


class _AnswerReader:
    """Passes an answer on, and keeps what is needed to read it: the body, or the last event of a stream."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_ok = self._is_stream = False
        self._body = b""

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._is_ok = message["status"] == 200
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and self._is_ok:
            self._body += message.get("body", b"")
            if self._is_stream:
                # Each event has the whole answer so far, so only the last one and what follows it are kept.
                events = [event for event in self._body.split(b"\n\n") if event != b"data: [DONE]"]
                self._body = b"\n\n".join(events[-2:])

    def objects(self) -> list[Mapping[str, Any]]:
        """The answers, one for each sample; empty if they are errors, or not complete."""
        if not self._is_ok:
            return []
        texts = self._body.split(b"\n\n") if self._is_stream else [self._body]
        for text in texts[::-1]:
            try:
                found = json.loads(text.removeprefix(b"data: "))
            except ValueError:
                continue
            objects = found if isinstance(found, list) else [found]
            return [each for each in objects if isinstance(each, dict) and "meta_info" in each]
        return []


def _receive_first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body once, and then what the client sends: its disconnection."""
    is_sent = False

    async def receive_next() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_next
