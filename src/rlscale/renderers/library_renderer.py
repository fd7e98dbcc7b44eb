"""Renderers of the library `renderers`, which has hand-written ones for the families of open models.

Only those: its fallback for other models, `DefaultRenderer`, has no bridge and no masks, and is refused.
"""

from collections.abc import Sequence
from typing import Any

from rlscale.errors import RenderError
from rlscale.renderers.answer_parser import Tokenizer, to_call
from rlscale.renderers.renderer import Message, ParsedAnswer, ToolSpec
from rlscale.renderers.template_messages import template_messages

INSTALL = "pip install 'rlscale[agents]'"
REFUSED = ("auto", "default", "custom")
"""Names of the library that are no hand-written renderer, or that import code."""

PROMPT_TAIL = 8
"""Ids of a prompt, before its generation prompt, that the library gets with an answer: it looks for the header."""


def load_library() -> Any:
    """The module `renderers`; None: it is not installed."""
    try:
        # Imported here: an extra, and it takes a second.
        import renderers
        import renderers.base
    except ImportError:
        return None
    return renderers


def library_names() -> tuple[str, ...]:
    """Names of the hand-written renderers; empty: the library is not installed."""
    library = load_library()
    if library is None:
        return ()
    library.base._populate_registry()
    return tuple(sorted(name for name in library.base.RENDERER_REGISTRY if name not in REFUSED))


def library_name_of(checkpoint: str) -> str | None:
    """The library's renderer for a hub id, which it has tested; None: it knows none."""
    library = load_library()
    return None if library is None else library.base.MODEL_RENDERER_MAP.get(checkpoint)


class LibraryRenderer:
    """A hand-written renderer of the library behind our protocol.

    Reasoning of earlier answers stays in a bridge (`thinking_retention=all`), as it was sampled. Rendering omits it
    where the model's template does, so that `prefix_stable` is false for those.

    Example:
        renderer = LibraryRenderer(tokenizer, "qwen3")
        renderer.bridge([*prompt_ids, *sampled_ids], [{"role": "user", "content": "2+2="}])
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """Builds the library's renderer.

        Raises:
            RenderError: the library is not installed, or the tokenizer lacks a token of this format.
        """
        library = load_library()
        if library is None:
            raise RenderError(f"the renderer {name} needs the package renderers; {INSTALL}")
        if name not in library_names():
            raise RenderError(f"renderer must be one of {', '.join(library_names())}, got {name!r}")
        try:
            config = library.config_from_name(name)
            # By default the library renders again where the template removes reasoning, and loses sampled tokens.
            config = type(config)(**{"thinking_retention": "all"})
            self._renderer = library.create_renderer(tokenizer, config)
        except (AssertionError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RenderError(f"the renderer {name} does not fit the tokenizer: {reason}") from error
        self._name = name
        self._stop_ids = tuple(self._renderer.get_stop_token_ids())
        question = [{"role": "user", "content": "1+1="}]
        self._prompt = self.render(question)[len(self.render(question, add_generation_prompt=False)) :]

    @property
    def name(self) -> str:
        return self._name

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def prefix_stable(self) -> bool:
        return bool(self._renderer.is_prefix_stable)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole conversation.

        Raises:
            RenderError: the format cannot express these messages.
        """
        checked = template_messages(messages)
        try:
            ids = self._renderer.render_ids(
                checked, tools=_library_tools(tools), add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # the library raises what its code meets
            raise self._error("render", error) from error
        return list(ids)

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> ParsedAnswer:
        """The message in sampled ids. Never raises for what a model writes."""
        # The whole prompt would be decoded, which takes longer than parsing.
        tail = list(prompt_ids[max(0, len(prompt_ids) - PROMPT_TAIL - len(self._prompt)) :])
        try:
            found = self._renderer.parse_response(list(output_ids), tools=_library_tools(tools), prompt_ids=tail)
        except Exception as error:  # the library raises what its code meets, e.g. for deeply nested JSON
            text = self._renderer._tokenizer.decode(list(output_ids), skip_special_tokens=True)
            return ParsedAnswer(content=text, error=str(self._error("parse", error)))
        calls, content, problem = [], found.content or "", None
        for call in found.tool_calls:
            try:
                if call.status != "ok" or not call.name:
                    raise ValueError(call.status)
                calls.append(to_call(call.name, call.arguments or {}, call_id=call.id or ""))
            except (ValueError, RecursionError) as error:
                problem = problem or f"tool call {call.raw.strip()[:80]!r}: {error}"
                content += call.raw
        return ParsedAnswer(content=content, reasoning=found.reasoning_content, tool_calls=tuple(calls), error=problem)

    def bridge(
        self, previous_ids: Sequence[int], new_messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> list[int] | None:
        """Ids of the next request, or None. What the library would cut or change is no bridge."""
        if not previous_ids or not new_messages:
            return None
        checked = template_messages(new_messages)
        answer = self._answer_start(previous_ids)
        start = max(0, answer - PROMPT_TAIL - len(self._prompt))
        # Only the end of the prompt: the library copies and scans what it gets.
        head, prompt, sampled = previous_ids[:start], previous_ids[start:answer], previous_ids[answer:]
        try:
            found = self._renderer.bridge_to_next_turn(
                list(prompt), list(sampled), checked, tools=_library_tools(tools)
            )
        except Exception as error:  # the library raises what its code meets
            raise self._error("bridge", error) from error
        # The library cuts what follows an end within an answer; that is no exact bridge.
        if found is None or list(found.token_ids[: len(previous_ids) - start]) != list(previous_ids[start:]):
            return None
        return [*head, *found.token_ids]

    def _answer_start(self, ids: Sequence[int]) -> int:
        """Position of the last answer: after the last generation prompt, or an end of an answer after it.

        Some formats have no generation prompt after the output of a tool.
        """
        size, stops = len(self._prompt), set(self._stop_ids)
        for position in range(len(ids) - 1, 0, -1):
            if size and list(ids[max(0, position - size) : position]) == self._prompt:
                return position
            if ids[position - 1] in stops:
                return position
        return len(ids) - 1

    def _error(self, what: str, error: Exception) -> RenderError:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return RenderError(f"the renderer {self._name} cannot {what} these messages: {reason}")


def _library_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None
