"""One session: the trajectory of an agent, grown by its calls, within its budgets.

    prepare ──> admit (waits while other calls hold the last turns) ──> engine ──> commit: record on disk, then tree

A call is in the trajectory once it is on disk, and it is on disk before it is answered. A call that fails, or whose
client disconnects, leaves no trace. Tokens are counted when an answer comes: calls at the same time do not wait for
each other, and the answer that exceeds the budget is cut.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlscale.errors import EngineError
from rlscale.gateway.apis.chat_answer import ChatAnswer, Choice, shown_answer
from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.codec import Codec
from rlscale.gateway.request_images import open_images
from rlscale.gateway.request_size import check_size
from rlscale.gateway.sampling_policy import call_seed, ids_digest, ignored_parameters, run_params
from rlscale.gateway.session_log import SessionLog
from rlscale.gateway.session_spec import SessionSpec
from rlscale.images import build_images
from rlscale.protocols import FAILED_CALL, SAMPLED_PLACEHOLDERS
from rlscale.renderers.conversation_tree import ConversationTree, PreparedRequest
from rlscale.renderers.message_images import SampledPlaceholderError
from rlscale.renderers.renderer import Message, ParsedAnswer
from rlscale.rollout.record_json import (
    array_from_json,
    array_to_json,
    generation_from_json,
    generation_to_json,
    images_to_json,
    trajectory_to_json,
)
from rlscale.types import Generation, SampleStatus, SamplingParams

log = logging.getLogger(__name__)

MAX_KEPT_ANSWERS = 16
"""Answers of a session that a client can get again after a broken connection."""

CONTEXT = "max_context_len"
"""Name of a budget of single requests: those after it may be answered."""

BUDGET, IGNORED, CALLS = "exhausted_budget", "ignored_parameters", "num_calls"
"""Entries of the trajectory's metadata: the first budget that ended it, parameters without effect, answered calls."""


# Three messages of SGLang (of its tokenizer manager and its scheduler), and one of the servers of this package.
_FULL_CONTEXT = re.compile(r"context length|exceeds the maximum allowed length|fit with max_new_tokens into")


@dataclass(kw_only=True, slots=True)
class PreparedCall:
    """A call that an engine can answer."""

    request: ChatRequest
    prepared: PreparedRequest
    fingerprint: str  # equal for a repetition of the same request
    time_s: int
    digest: bytes  # of its ids
    number: int | None = None  # among the calls with the same ids, once it is admitted
    is_recorded: bool = False

    @property
    def token_ids(self) -> list[int]:
        return self.prepared.token_ids


class Session:
    """State of one session. `admit` belongs to the event loop; the others run one at a time, in any thread."""

    def __init__(self, spec: SessionSpec, codec: Codec, log_file: SessionLog) -> None:
        self.spec, self._codec, self._log = spec, codec, log_file
        self.trajectory = spec.new_trajectory()
        self._images = None if codec.images is None else codec.images.of(spec.prompt)
        self._tree = ConversationTree(self.trajectory, codec.renderer, images=self._images)
        self.is_finished = False
        self._num_calls = self._num_open = 0
        self._changed = asyncio.Condition()
        # Messages up to and with each answered turn; those of the calls by number, for the ids of responses.
        self._histories: dict[int, tuple[Message, ...]] = {}
        self._turn_of_call: list[tuple[int, bool]] = []  # and whether its first message was an instruction
        self._numbers: dict[bytes, set[int]] = {}  # of open and recorded calls, by the digest of their ids
        self._undelivered: dict[str, ChatAnswer] = {}

    # Called by the event loop

    @asynccontextmanager
    async def admit(self, call: PreparedCall) -> AsyncIterator[SamplingParams]:
        """Reserves a turn for a call, and yields its sampling parameters.

        Raises:
            InvalidRequest: a budget is exhausted, or the messages fill the context.
        """
        async with self._changed:
            while (size := self._size(call)) is None:
                await self._changed.wait()
            self._num_open += 1
        self._take_number(call)
        try:
            yield self._params(call, size)
        finally:
            # A repetition of a call that failed has the same number, and so the same seed.
            if not call.is_recorded and call.number is not None:
                self._numbers[call.digest].discard(call.number)
            async with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def _take_number(self, call: PreparedCall) -> None:
        """Numbers a call among those with the same ids, open ones included: each has another seed."""
        taken = self._numbers.setdefault(call.digest, set())
        if call.number is None:
            call.number = next(number for number in itertools.count() if number not in taken)
        taken.add(call.number)

    def _size(self, call: PreparedCall) -> int | None:
        """Tokens that each answer of a call may have; None: it has to wait for the turns of open calls."""
        spec, n = self.spec, call.request.n
        if spec.max_turns is not None and self._num_calls + self._num_open >= spec.max_turns:
            if self._num_calls < spec.max_turns:
                return None
            raise self._exhausted("max_turns", f"{spec.max_turns} turns (agent.max_turns)")
        left = self._tokens_left(n)
        limits = [left] if call.request.max_tokens is None else [left, call.request.max_tokens]
        if spec.params.max_context_len is not None:
            limits.append(self._context_left(call, spec.params.max_context_len))
        return min(limits)

    def _tokens_left(self, n: int) -> int:
        """Tokens that each of `n` answers may have of those that no answer has used yet."""
        limit = self.spec.params.max_new_tokens
        left = (limit - self.trajectory.num_sampled) // n
        if left < 1:
            raise self._exhausted("max_tokens", f"{limit} sampled tokens (rollout.max_response_len)")
        return left

    def _context_left(self, call: PreparedCall, limit: int) -> int:
        left = limit - len(call.token_ids)
        if left < 1:
            self._note_exhausted(CONTEXT)
            raise InvalidRequest(
                f"messages must have fewer than {limit} tokens (rollout.max_context_len), got {len(call.token_ids)}",
                param="messages",
                code="context_length_exceeded",
            )
        return left

    def refusal(self, error: EngineError) -> InvalidRequest:
        """The error of a call that an engine refused; messages longer than its context use up a budget."""
        reason = error.reason or str(error)
        if not _FULL_CONTEXT.search(reason):
            return InvalidRequest(f"the engine refused the request: {reason}")
        self._note_exhausted(CONTEXT)
        return InvalidRequest(
            f"messages must fit the context of the engine: {reason}", param="messages", code="context_length_exceeded"
        )

    def note_failure(self, error: Exception) -> None:
        """Notes that a call failed, until a later one is answered."""
        self.trajectory.metadata[FAILED_CALL] = f"{type(error).__name__}: {error}"

    def _exhausted(self, name: str, what: str) -> InvalidRequest:
        self._note_exhausted(name)
        return InvalidRequest(
            f"the session must have at most {what}, and has used all of them; end the attempt", code="budget_exhausted"
        )

    def _note_exhausted(self, name: str) -> None:
        if BUDGET not in self.trajectory.metadata:
            self.trajectory.metadata[BUDGET] = name
            self._log.append({"event": "budget", "name": name})

    def _params(self, call: PreparedCall, size: int) -> SamplingParams:
        params = run_params(call.request, self.spec.params)
        stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *self._codec.renderer.stop_ids)))
        seed = None
        if params.sampling_seed is not None:
            assert call.number is not None, "an admitted call has a number"
            seed = call_seed(self.spec.seed, call.digest, call.number)
        return replace(
            params,
            images=params.images if self._images is None else self._tree.images_of(call.prepared),
            max_new_tokens=size,
            min_new_tokens=min(params.min_new_tokens, size),
            stop_token_ids=stop_ids,
            sampling_seed=seed,
        )

    # Called by one thread at a time

    def prepare(self, request: ChatRequest, *, fingerprint: str, time_s: int) -> PreparedCall:
        """Renders a request. The trajectory stays as it is; its images are known from now on.

        Raises:
            InvalidRequest: a parameter cannot be obeyed, an image cannot be read, or no context holds the messages.
            RenderError: the template cannot render the messages; or the policy wrote placeholders of images, which
                the session notes.
        """
        run_params(request, self.spec.params)
        request = self._with_hashes(request)
        self._check_size(request)
        request = self._continued(request)
        prepared = self._render(request)
        if prepared.parent is not None:
            # Messages of the path are kept once, not once for each call.
            known = self._histories[prepared.parent]
            prepared = replace(prepared, messages=(*known, *prepared.messages[len(known) :]))
        digest = ids_digest(prepared.token_ids)
        return PreparedCall(request=request, prepared=prepared, fingerprint=fingerprint, time_s=time_s, digest=digest)

    def _check_size(self, request: ChatRequest) -> None:
        try:
            check_size(request, self._codec, max_context_len=self.spec.params.max_context_len)
        except InvalidRequest:
            self._note_exhausted(CONTEXT)
            raise

    def count_tokens(self, request: ChatRequest) -> int:
        return len(self._render(self._with_hashes(request)).token_ids)

    def _with_hashes(self, request: ChatRequest) -> ChatRequest:
        """The request with hashes in place of its images, which are known from now on."""
        request, images = open_images(request, self._codec)
        if self._images is not None:
            self._images.add(images)
        return request

    def _render(self, request: ChatRequest) -> PreparedRequest:
        try:
            return self._tree.prepare(request.messages, request.tools)
        except SampledPlaceholderError as error:
            self._note_placeholders(str(error))
            raise

    def _note_placeholders(self, message: str) -> None:
        if SAMPLED_PLACEHOLDERS not in self.trajectory.metadata:
            self.trajectory.metadata[SAMPLED_PLACEHOLDERS] = message
            self._log.append({"event": "placeholders", "message": message})

    def _continued(self, request: ChatRequest) -> ChatRequest:
        """The request with the messages of the response that it continues."""
        if request.previous_id is None:
            return request
        # The id names the session, so that no session continues a response of another.
        _, _, number = request.previous_id.rpartition("_")
        known = int(number) if number.isdecimal() and int(number) < len(self._turn_of_call) else None
        if known is None or request.previous_id != f"resp_{self._call_key(known)}":
            raise InvalidRequest(
                f"previous_response_id must be a response of this session, got {request.previous_id[:80]!r}",
                param="previous_response_id",
                status=404,
            )
        turn, has_instructions = self._turn_of_call[known]
        history = self._histories[turn][1:] if has_instructions else self._histories[turn]
        instructions = request.messages[:1] if request.has_instructions else ()
        new = request.messages[len(instructions) :]
        return replace(request, messages=(*instructions, *history, *new))

    def commit(self, call: PreparedCall, generations: Sequence[Generation]) -> ChatAnswer:
        """Records an answered call, adds it to the trajectory, and returns its answer.

        Raises:
            InvalidRequest: the calls that were answered before it have used up the budget.
            OSError: it cannot be recorded.
        """
        if self.is_finished:
            raise InvalidRequest("the session has ended", status=401)
        self._take_number(call)
        generations = self._fit_budget(call, generations)
        # The record comes first: what is in the trajectory must survive a crash, and what fails here is not in it.
        self._log.append(self._to_line(call, generations))
        return self._add(call, generations)

    def _fit_budget(self, call: PreparedCall, generations: Sequence[Generation]) -> Sequence[Generation]:
        """The answers within the tokens that calls at the same time have left."""
        left = self.spec.params.max_new_tokens - self.trajectory.num_sampled
        if sum(len(each.output_ids) for each in generations) <= left:
            return generations
        size = self._tokens_left(len(generations))
        return [self._cut(each, size, num_prompt_tokens=len(call.token_ids)) for each in generations]

    def _cut(self, answer: Generation, size: int, *, num_prompt_tokens: int) -> Generation:
        """The first tokens of an answer, as if `size` had been its limit."""
        if len(answer.output_ids) <= size:
            return answer
        ids, decode = answer.output_ids[:size], self._codec.decode
        return replace(
            answer,
            output_ids=ids,
            logprobs=answer.logprobs[:size],
            weight_versions=answer.weight_versions[:size],
            finish_reason="length",
            text="" if decode is None else decode(ids),
            # The last token was never an input, so it has no routes.
            routes=None if answer.routes is None else answer.routes[: num_prompt_tokens + size - 1],
        )

    def find_answer(self, fingerprint: str) -> ChatAnswer | None:
        """The recorded answer of a repeated request, if the client may not have got it."""
        return self._undelivered.get(fingerprint)

    def mark_delivered(self, call_fingerprint: str) -> None:
        self._undelivered.pop(call_fingerprint, None)

    def finish(self) -> dict[str, Any]:
        """Ends the session and returns its trajectory as JSON. May be repeated."""
        if not self.is_finished:
            self._log.append({"event": "finish"})
            self.is_finished = True
        return self.result()

    def result(self) -> dict[str, Any]:
        """The trajectory so far, as JSON."""
        if not {BUDGET, SAMPLED_PLACEHOLDERS}.isdisjoint(self.trajectory.metadata):
            self.trajectory.status = SampleStatus.truncated
        return trajectory_to_json(self.trajectory)

    def delete(self) -> None:
        self.is_finished = True
        self._log.delete()

    def begin(self) -> None:
        """Writes the first line of the file."""
        self._log.append({"event": "open", "session": self.spec.to_json()})

    def replay(self, lines: Sequence[dict[str, Any]]) -> None:
        """Adds the lines of the file, without the first one."""
        for line in lines:
            if line["event"] == "finish":
                self.is_finished = True
            elif line["event"] == "budget":
                self.trajectory.metadata[BUDGET] = line["name"]
            elif line["event"] == "placeholders":
                self.trajectory.metadata[SAMPLED_PLACEHOLDERS] = line["message"]
            else:
                self._add(*self._from_line(line))

    def _add(self, call: PreparedCall, generations: Sequence[Generation]) -> ChatAnswer:
        request, key = call.request, self._call_key(self._num_calls)
        # Every answer is a branch after the same ids; a response is continued from the first one.
        choices = []
        for number, generation in enumerate(generations):
            choice = self._add_choice(call, generation, key if len(generations) == 1 else f"{key}_{number}")
            if number == 0:
                self._turn_of_call.append((len(self.trajectory.turns) - 1, request.has_instructions))
            choices.append(choice)
        self._take_number(call)
        call.is_recorded = True
        self._num_calls += 1
        self._note_call(request)
        answer = ChatAnswer(
            key=key,
            created_s=call.time_s,
            model=request.model,
            num_prompt_tokens=len(call.token_ids),
            choices=tuple(choices),
        )
        self._undelivered[call.fingerprint] = answer
        while len(self._undelivered) > MAX_KEPT_ANSWERS:
            # Dicts keep the order of insertion: the oldest one goes.
            del self._undelivered[next(iter(self._undelivered))]
        return answer

    def _add_choice(self, call: PreparedCall, generation: Generation, key: str) -> Choice:
        request, found = call.request, list[str | None]()

        def shown(answer: ParsedAnswer) -> ParsedAnswer:
            answer, stop = shown_answer(answer, key=key, stop=request.stop)
            found.append(stop)
            return answer

        answer = self._tree.add(call.prepared, generation, shown=shown)
        self._histories[len(self.trajectory.turns) - 1] = (*call.prepared.messages, answer.to_message())
        tokens = self._codec.token_texts(generation.output_ids) if request.logprobs else ()
        return Choice(answer=answer, generation=generation, tokens=tokens, stop=found[0])

    def _note_call(self, request: ChatRequest) -> None:
        metadata = self.trajectory.metadata
        metadata[CALLS] = self._num_calls
        metadata.pop(FAILED_CALL, None)
        # An agent that shortens its messages after it filled the context has not ended there.
        if metadata.get(BUDGET) == CONTEXT:
            del metadata[BUDGET]
        if ignored := ignored_parameters(request, self.spec.params):
            metadata[IGNORED] = sorted({*metadata.get(IGNORED, ()), *ignored})

    def _call_key(self, number: int) -> str:
        return f"{self.spec.id[:12]}_{number}"

    def _to_line(self, call: PreparedCall, generations: Sequence[Generation]) -> dict[str, Any]:
        """A call without what the calls before it have: the messages and ids of the path that it continues."""
        request, prepared = call.request, call.prepared
        known = 0 if prepared.parent is None else len(self._histories[prepared.parent])
        return {
            "event": "call",
            "fingerprint": call.fingerprint,
            "time_s": call.time_s,
            "number": call.number,
            "parent": prepared.parent,
            "is_fork": prepared.is_fork,
            "messages": list(prepared.messages[known:]),
            "tools": list(prepared.tools),
            "new_ids": array_to_json(prepared.token_ids[prepared.num_known :], "<i4"),
            "images": images_to_json(prepared.images),
            "request": {
                "n": request.n,
                "stop": list(request.stop),
                "logprobs": request.logprobs,
                "model": request.model,
                "sampling": dict(request.sampling),
                "ignored": list(request.ignored),
                "has_instructions": request.has_instructions,
            },
            "generations": [generation_to_json(each) for each in generations],
        }

    def _from_line(self, line: dict[str, Any]) -> tuple[PreparedCall, list[Generation]]:
        parent, new_ids = line["parent"], array_from_json(line["new_ids"]).tolist()
        # Calls are replayed in the order in which they were added, so turns have the same numbers.
        known_ids = [] if parent is None else self.trajectory.token_ids(parent)
        known_messages = () if parent is None else self._histories[parent]
        images = build_images(line["images"])
        if self._images is not None:
            self._images.add(images)
        prepared = PreparedRequest(
            token_ids=known_ids + new_ids,
            messages=(*known_messages, *line["messages"]),
            tools=tuple(line["tools"]),
            parent=parent,
            num_known=len(known_ids),
            num_known_messages=len(known_messages),
            is_fork=line["is_fork"],
            images=images,
        )
        given = line["request"]
        request = ChatRequest(
            messages=prepared.messages,
            tools=prepared.tools,
            **{**given, "stop": tuple(given["stop"]), "ignored": tuple(given["ignored"])},
        )
        call = PreparedCall(
            request=request,
            prepared=prepared,
            fingerprint=line["fingerprint"],
            time_s=line["time_s"],
            number=line["number"],
            digest=ids_digest(prepared.token_ids),
        )
        return call, [generation_from_json(each) for each in line["generations"]]
