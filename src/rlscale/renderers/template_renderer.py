"""Renderer by the chat template of a tokenizer, with a bridge where the template is proven to allow one.

    ids of an answered request ... answer END | suffix of the new messages, generation prompt
                                              └─ equal for every history: rendered after a made-up one

The proof is by probes, when the renderer is made: several histories, answers and new messages give the same suffix.
Otherwise there is no bridge, and a trajectory forks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.errors import RenderError
from rlscale.renderers.answer_parser import AnswerFormat, AnswerParser, Tokenizer
from rlscale.renderers.renderer import Message, ParsedAnswer, ToolSpec
from rlscale.renderers.template_messages import (
    ANSWERS,
    dummy_histories,
    probe_additions,
    probe_histories,
    template_messages,
)

PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}


class TemplateRenderer:
    """Renders with `tokenizer.apply_chat_template`.

    Invariant: a bridge begins with the ids it got, and its new ids do not depend on them, but for the end token that a
    cut answer lacks.

    Example:
        renderer = TemplateRenderer(tokenizer, HERMES, name="chatml")
        ids = renderer.render([{"role": "user", "content": "1+1="}])
        longer = renderer.bridge([*ids, *sampled], [{"role": "user", "content": "2+2="}])
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat,
        *,
        name: str,
        stop_ids: Sequence[int] = (),
        arguments: Mapping[str, Any] | None = None,
        reads_images: bool = False,
    ) -> None:
        """Probes the template; takes some milliseconds.

        Args:
            stop_ids: that end an answer, in addition to those of the template and the tokenizer.
            arguments: further variables of the template, e.g. `enable_thinking`.
            reads_images: messages may have parts that are images; each becomes one placeholder.

        Raises:
            RenderError: the tokenizer has no chat template, or it cannot render a question.
        """
        self._tokenizer, self._name, self._arguments = tokenizer, name, dict(arguments or {})
        self._reads_images = reads_images
        self._render_checked([{"role": "user", "content": "1+1="}], (), True)
        self._end_id = self._find_end_id()
        known = [self._end_id, tokenizer.eos_token_id, *stop_ids]
        self._stop_ids = tuple(dict.fromkeys(each for each in known if each is not None))
        self._parser = AnswerParser(tokenizer, answer_format, stop_ids=self._stop_ids)
        self._shows_calls, self._shows_tools = self._probe_tools()
        self._bridged_roles = self._prove_bridges()
        self._prefix_stable = self._probe_stability()

    @property
    def name(self) -> str:
        return self._name

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def prefix_stable(self) -> bool:
        return self._prefix_stable

    @property
    def bridged_roles(self) -> tuple[str, ...]:
        """Roles of a first new message that a bridge is proven for; empty: there is no bridge."""
        return self._bridged_roles

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole conversation.

        Raises:
            RenderError: the template refuses these messages, or would silently omit tools or calls.
        """
        # Omitting a tool silently would train a model on calls of tools that its prompt lacks.
        checked = template_messages(messages, has_images=self._reads_images)
        if tools and not self._shows_tools:
            raise self._omits("tools")
        if not self._shows_calls and any(message.get("tool_calls") for message in checked):
            raise RenderError(
                f"the chat template of {self._name} omits tool calls; use a model whose template has them"
            )
        return self._render_checked(checked, tools, add_generation_prompt)

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> ParsedAnswer:
        """The message in sampled ids. Never raises for what a model writes."""
        return self._parser.parse(output_ids, prompt_ids=prompt_ids, tools=tools)

    def bridge(
        self, previous_ids: Sequence[int], new_messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> list[int] | None:
        """Ids of the next request, or None. The end token of a cut answer is added before the new messages."""
        if not previous_ids or not new_messages or new_messages[0].get("role") not in self._bridged_roles:
            return None
        if any(message.get("role") not in ("user", "tool") for message in new_messages):
            return None
        checked = template_messages(new_messages, has_images=self._reads_images)
        # Two made-up histories: a template that looks back gives different suffixes for these messages.
        suffixes = [self._suffix(history, checked) for history in dummy_histories(checked)]
        if suffixes[0] is None or suffixes[0] != suffixes[1]:
            return None
        return self._joined(previous_ids, suffixes[0])

    def _joined(self, previous_ids: Sequence[int], suffix: list[int]) -> list[int] | None:
        # The end of a cut answer is given, not sampled: it belongs to the new turn, and is not trained.
        last = previous_ids[-1]
        if self._end_id is not None:
            return [*previous_ids, *suffix] if last == self._end_id else [*previous_ids, self._end_id, *suffix]
        # Without an end token the first token of the next message ends an answer, and the model samples it.
        if last == suffix[0]:
            return [*previous_ids, *suffix[1:]]
        return None if last in self._stop_ids and last != self._tokenizer.eos_token_id else [*previous_ids, *suffix]

    def _render_checked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec], add_generation_prompt: bool
    ) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **self._arguments,
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:300]
            raise RenderError(f"the chat template of {self._name} cannot render these messages: {reason}") from error
        return list(ids)

    def _try_render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec] = (), *, prompt: bool = False
    ) -> list[int] | None:
        try:
            return self._render_checked(messages, tools, prompt)
        except RenderError:
            return None

    def _omits(self, what: str) -> RenderError:
        return RenderError(f"the chat template of {self._name} omits {what}; use a model whose template has them")

    def _find_end_id(self) -> int | None:
        """The first id after an answer, if it is a special token; None: the template has none."""
        question = {"role": "user", "content": "hi"}
        first, second = (self._try_render([question, {"role": "assistant", "content": text}]) for text in ANSWERS)
        if first is None or second is None:
            return None
        size = 0
        while size < min(len(first), len(second)) and first[-size - 1] == second[-size - 1]:
            size += 1
        end_id = first[-size] if size else None
        # A plain token could also be the end of the answer's text.
        special = {*self._tokenizer.get_added_vocab().values(), self._tokenizer.eos_token_id}
        return end_id if end_id in special else None

    def _suffix(
        self,
        history: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Ids that the new messages and the generation prompt add after the end of a history's last answer."""
        base = self._try_render(history, tools)
        whole = self._try_render([*history, *new_messages], tools, prompt=True)
        if base is None or whole is None:
            return None
        if self._end_id is None:
            return whole[len(base) :] or None if whole[: len(base)] == base else None
        # Counted, as templates may change an answer once it is no longer the last one, e.g. remove its reasoning.
        ends = [position for position, each in enumerate(whole) if each == self._end_id]
        number = base.count(self._end_id)  # of the answer's end, from 1
        return whole[ends[number - 1] + 1 :] if 0 < number <= len(ends) else None

    def _probe_tools(self) -> tuple[bool, bool]:
        """Whether the template shows calls of an answer, and the tools of a request."""
        user = {"role": "user", "content": "hi"}
        call = {"id": "c", "type": "function", "function": {"name": "probe", "arguments": {"n": 1}}}
        called = self._try_render([user, {"role": "assistant", "content": "", "tool_calls": [call]}], (PROBE_TOOL,))
        silent = self._try_render([user, {"role": "assistant", "content": ""}], (PROBE_TOOL,))
        shown, hidden = self._try_render([user], (PROBE_TOOL,)), self._try_render([user])
        return called is not None and called != silent, shown is not None and shown != hidden

    def _prove_bridges(self) -> tuple[str, ...]:
        """Roles whose new messages give one suffix after every probe that the template can render."""
        proven = []
        for role, additions in probe_additions().items():
            # A template may need a call before the output of a tool, and some drop calls.
            ends_in_call = role == "tool" and self._shows_calls
            histories = [h for h in probe_histories() if bool(h[-1].get("tool_calls")) == ends_in_call]
            if all(self._is_independent(histories, addition) for addition in additions):
                proven.append(role)
        return tuple(proven)

    def _is_independent(
        self, histories: Sequence[Sequence[Mapping[str, Any]]], addition: Sequence[Mapping[str, Any]]
    ) -> bool:
        # A bridge renders no tools: they must not change what follows an answer.
        tools: list[Sequence[ToolSpec]] = [(), (PROBE_TOOL,)] if self._shows_tools else [()]
        found = [self._suffix(history, addition, each) for history in histories for each in tools]
        found += [self._suffix(history, addition) for history in dummy_histories(addition)]
        known = [suffix for suffix in found if suffix is not None]
        return len(known) == len(found) and all(suffix == known[0] for suffix in known)

    def _probe_stability(self) -> bool:
        """Whether every probe begins with the ids of its parts."""
        additions = probe_additions()
        for history in probe_histories():
            more = additions["tool" if history[-1].get("tool_calls") else "user"][0]
            whole = self._try_render([*history, *more], prompt=True)
            for size in range(1, len(history) + 1):
                part = self._try_render(history[:size])
                if whole is None or (part is not None and whole[: len(part)] != part):
                    return False
        return True
