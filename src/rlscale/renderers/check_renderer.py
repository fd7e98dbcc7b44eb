"""Checks of a renderer on small conversations: what training on agents needs of a chat template.

A check ends in `ok`, `failed`, `forks` (there is no bridge: training works, each such turn has its own prompt) or
`absent` (the template has no such part).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlscale.errors import RenderError
from rlscale.renderers.answer_parser import Tokenizer
from rlscale.renderers.conversation_tree import ConversationTree
from rlscale.renderers.message_history import message_key
from rlscale.renderers.renderer import Message, Renderer, ToolSpec
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, Prompt

TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "What is 12+30?"}
AGAIN = {"role": "user", "content": "And 1+1?"}
RESULT = {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "42"}
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'}}
ANSWER = {"role": "assistant", "content": "It is 42, then."}
REASONED = {**ANSWER, "reasoning_content": "12 and 30 make 42."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}

NEIGHBOURS = 8
"""Tokens that are shown on each side of the first one that differs."""


class TemplateVerdict(StrEnum):
    ok = "ok"
    failed = "failed"
    forks = "forks"
    absent = "absent"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateCheck:
    """The end of one check, with a line of detail."""

    name: str
    verdict: TemplateVerdict
    detail: str = ""


def check_renderer(renderer: Renderer, tokenizer: Tokenizer) -> list[TemplateCheck]:
    """Runs all checks, in the order of a reader's questions."""
    return [_run(name, check, renderer, tokenizer) for name, check in CHECKS.items()]


def _run(name: str, check: "Check", renderer: Renderer, tokenizer: Tokenizer) -> TemplateCheck:
    try:
        verdict, detail = check(renderer, tokenizer)
    except (RenderError, AssertionError) as error:  # a renderer that changes ids breaks an assertion of the tree
        verdict, detail = TemplateVerdict.failed, str(error)
    return TemplateCheck(name=name, verdict=verdict, detail=detail)


Check = Callable[[Renderer, Tokenizer], tuple[TemplateVerdict, str]]


def _check_stop_ids(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
    if not renderer.stop_ids:
        return TemplateVerdict.failed, "no token ends an answer: generation would always run to its limit"
    # An id beyond the vocabulary would never be sampled.
    known = set(tokenizer.get_vocab().values())
    if missing := [each for each in renderer.stop_ids if each not in known]:
        return TemplateVerdict.failed, f"the tokenizer has no tokens {missing}"
    prompt = renderer.render([USER])
    whole = renderer.render([USER, ANSWER, AGAIN])
    # The end of the answer, or the next role where the template has no end.
    start = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if not set(whole[start:]) & set(renderer.stop_ids):
        return TemplateVerdict.failed, f"no stop id follows an answer: {_shown(tokenizer, whole[start:])}"
    return TemplateVerdict.ok, " ".join(f"{_shown(tokenizer, [each])} ({each})" for each in renderer.stop_ids)


def _round_trip(message: Message, tools: Sequence[ToolSpec] = ()) -> Check:
    """A rendered answer is parsed to the same message."""

    def check(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
        prompt = renderer.render([USER], tools=tools)
        whole = renderer.render([USER, message], tools=tools, add_generation_prompt=False)
        start = prompt
        if whole[: len(prompt)] != prompt:
            # Templates that open the reasoning in the prompt omit it from earlier answers.
            start = renderer.render([USER], tools=tools, add_generation_prompt=False)
            if whole[: len(start)] != start:
                return TemplateVerdict.failed, _difference(tokenizer, prompt, whole)
            start = _longest_common(prompt, whole)
        ids = _answer_ids(whole[len(start) :], renderer.stop_ids)
        parsed = renderer.parse(ids, prompt_ids=start, tools=tools)
        if message.get("reasoning_content") and message["reasoning_content"] not in _text(tokenizer, whole):
            return TemplateVerdict.absent, "the template omits the reasoning of an answer"
        if parsed.error is not None:
            return TemplateVerdict.failed, parsed.error
        found = parsed.to_message()
        if _comparable(found) != _comparable(message):
            return TemplateVerdict.failed, f"{_text(tokenizer, ids)!r} is parsed as {found}"
        return TemplateVerdict.ok, ""

    return check


def _comparable(message: Message) -> tuple[str, str, str]:
    """A message without the line breaks around its parts, which some models write and others do not."""
    reasoning = str(message.get("reasoning_content") or "").strip()
    return message_key({**message, "content": ""}), str(message.get("content") or "").strip(), reasoning


def _check_call(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
    try:
        renderer.render([USER, CALLED], tools=[TOOL])
    except RenderError as error:
        return TemplateVerdict.absent, str(error)
    return _round_trip(CALLED, [TOOL])(renderer, tokenizer)


def _check_tools(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
    try:
        with_tools, without = renderer.render([USER], tools=[TOOL]), renderer.render([USER])
    except RenderError as error:
        return TemplateVerdict.absent, str(error)
    if with_tools == without:
        return TemplateVerdict.absent, "the template omits tools: describe them in the prompt"
    return TemplateVerdict.ok, f"{len(with_tools) - len(without)} tokens for one tool"


def _check_append_only(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
    """Whether a longer conversation begins with the ids of a shorter one."""
    for history, more in (([USER, ANSWER], AGAIN), ([SYSTEM, USER, REASONED], AGAIN)):
        part = renderer.render(history, add_generation_prompt=False)
        whole = renderer.render([*history, more])
        if whole[: len(part)] != part:
            known = [*renderer.render([USER]), *_sampled(renderer, tokenizer), renderer.stop_ids[0]]
            verdict = TemplateVerdict.failed if renderer.bridge(known, [AGAIN]) is None else TemplateVerdict.ok
            after = "a bridge keeps its ids" if verdict == TemplateVerdict.ok else "no bridge keeps its ids"
            return verdict, f"the template changes an earlier answer; {after}: {_difference(tokenizer, part, whole)}"
    return TemplateVerdict.ok, ""


def _bridge(new: Message, *, cut: bool = False, splits: bool = False) -> Check:
    """A bridge exists, and keeps the ids."""

    def check(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
        sampled = _sampled(renderer, tokenizer)
        if splits:
            other = _split_first(tokenizer, sampled)
            if other is None:
                return TemplateVerdict.absent, "each text of the check has one tokenization"
            sampled = other
        known = [*renderer.render([USER]), *sampled, *([] if cut else [renderer.stop_ids[0]])]
        longer = renderer.bridge(known, [new])
        if longer is None:
            return TemplateVerdict.forks, "each such turn has its own prompt (trajectory/forks)"
        if longer[: len(known)] != known:
            return TemplateVerdict.failed, _difference(tokenizer, known, longer)
        return TemplateVerdict.ok, _shown(tokenizer, longer[len(known) :])

    return check


def _check_masks(renderer: Renderer, tokenizer: Tokenizer) -> tuple[TemplateVerdict, str]:
    """Captures two turns as a run does: exactly the sampled ids are trained, each once."""
    trajectory = Trajectory(id=0, group_index=0, prompt=Prompt(index=0, text="", token_ids=()), seed=0)
    tree, messages, num_sampled = ConversationTree(trajectory, renderer), list[Message]([SYSTEM, USER]), 0
    for _ in range(2):
        ids = [*_sampled(renderer, tokenizer), renderer.stop_ids[0]]
        num_sampled += len(ids)
        request = tree.prepare(messages)
        answer = tree.add(request, _generation(ids))
        messages += [answer.to_message(), AGAIN]
    samples = trajectory.samples()
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    if trained != num_sampled:
        return TemplateVerdict.failed, f"{trained} of {num_sampled} sampled tokens are trained"
    return TemplateVerdict.ok, f"{trained} sampled tokens of 2 turns are trained, in {len(samples)} sequence(s)"


CHECKS: Mapping[str, Check] = {
    "stop ids": _check_stop_ids,
    "round trip of an answer": _round_trip(ANSWER),
    "round trip of reasoning": _round_trip(REASONED),
    "tools": _check_tools,
    "round trip of a tool call": _check_call,
    "append-only rendering": _check_append_only,
    "bridge to a user's message": _bridge(AGAIN),
    "bridge to a tool's output": _bridge(RESULT),
    "bridge after a cut answer": _bridge(AGAIN, cut=True),
    "bridge after another tokenization": _bridge(AGAIN, splits=True),
    "masks": _check_masks,
}
"""Name -> check."""


def _sampled(renderer: Renderer, tokenizer: Tokenizer) -> list[int]:
    """An answer as a model would sample it, without its end: closed reasoning where the prompt opened one."""
    # A reasoning that never ends has no bridge, and no model stops within one.
    opens = _text(tokenizer, renderer.render([USER])).rstrip().endswith("<think>")
    text = "12 and 30.</think>The thing is 42" if opens else "<think>\nhm\n</think>\n\nThe thing is 42"
    known = tokenizer.get_vocab()
    text = text if opens or "<think>" in known else "The thing is 42"
    return list(tokenizer.encode(text, add_special_tokens=False))


def _split_first(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int] | None:
    """Other ids of the same text: one token replaced by those of its parts. None: no token can be."""
    for position, each in enumerate(ids):
        text = _text(tokenizer, [each])
        parts = [part for character in text for part in tokenizer.encode(character, add_special_tokens=False)]
        special = each in tokenizer.get_added_vocab().values()
        if not special and len(parts) > 1 and _text(tokenizer, parts) == text:
            return [*ids[:position], *parts, *ids[position + 1 :]]
    return None


def _generation(ids: list[int]) -> Generation:
    return Generation(
        text="",
        output_ids=ids,
        logprobs=[-1.0] * len(ids),
        weight_versions=[0] * len(ids),
        finish_reason="stop",
        engine="check",
    )


def _answer_ids(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """Ids up to the first stop id, with it."""
    end = next((i + 1 for i, each in enumerate(ids) if each in stop_ids), len(ids))
    return list(ids[:end])


def _longest_common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return list(first[: _first_difference(first, second)])


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _difference(tokenizer: Tokenizer, expected: Sequence[int], found: Sequence[int]) -> str:
    """The first token that differs, with its neighbours."""
    at = _first_difference(expected, found)
    before = _shown(tokenizer, expected[max(0, at - NEIGHBOURS) : at])
    one, other = (list(ids[at : at + NEIGHBOURS]) for ids in (expected, found))
    return f"token {at} after {before}: {_parts(tokenizer, one)} became {_parts(tokenizer, other)}"


def _parts(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return f"{_shown(tokenizer, ids[:1])} ({ids[0]}) {_shown(tokenizer, ids[1:])}" if ids else "the end"


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return repr(_text(tokenizer, ids))


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""


def failures(results: Sequence[TemplateCheck]) -> Iterator[TemplateCheck]:
    """Checks that failed."""
    return (each for each in results if each.verdict == TemplateVerdict.failed)


def describe(results: Sequence[TemplateCheck]) -> dict[str, Any]:
    """The results as JSON values."""
    return {each.name: {"verdict": str(each.verdict), "detail": each.detail} for each in results}
