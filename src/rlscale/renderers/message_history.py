"""Histories of messages as a tree: the known part of a request is found without hashing it again.

    root ── system ── user ── answer (turn 0) ─┬─ tool ── answer (turn 2)
                                               └─ user ── answer (turn 4)

A request carries its whole history again. Each of its messages is compared with the copy in the tree, which takes less
than a microsecond; only messages that differ in form are keyed.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rlscale.images import image_digests
from rlscale.renderers.renderer import Message, ToolSpec


@dataclass(slots=True)
class HistoryNode:
    """A history: the messages from the root to this one."""

    message: dict[str, Any]  # a copy: agents change their messages in place
    children: dict[str, "HistoryNode"] = field(default_factory=dict)  # by `message_key`
    turn: int | None = None  # newest turn whose answer ends this history
    ids: list[int] | None = None  # of the path to `turn`, at the end of a path only

    def find(self, message: Message) -> tuple[str, "HistoryNode | None"]:
        """Key of a message that follows this history, and the longer history. None: it is new."""
        for key, child in self.children.items():
            if child.message == message:
                return key, child
        key = message_key(message)
        found = self.children.get(key)
        if found is not None:
            # A client writes a message in its own form, and repeats that form.
            found.message = _copy(message)
        return key, found


class MessageHistory:
    """Histories of the requests of one trajectory, one tree for each list of tools.

    Example:
        history = MessageHistory()
        history.add(keys, messages, tools).turn = 0
        keys, known = history.walk([*messages, new], tools)  # `known` ends with the histories that the list continues
    """

    def __init__(self) -> None:
        self._roots: list[tuple[list[Any], HistoryNode]] = []

    def walk(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[tuple[str, ...], list[HistoryNode]]:
        """Keys of all messages, and the known histories that they continue, from the shortest."""
        node: HistoryNode | None = self._root(tools)
        keys: list[str] = []
        known: list[HistoryNode] = []
        for message in messages:
            key, node = (message_key(message), None) if node is None else node.find(message)
            keys.append(key)
            if node is not None:
                known.append(node)
        return tuple(keys), known

    def add(self, keys: Sequence[str], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> HistoryNode:
        """The history of some messages; adds it if it is new."""
        root = self._root(tools)
        if root is None:
            root = HistoryNode(message={})
            self._roots.append((deepcopy(list(tools)), root))
        node = root
        for key, message in zip(keys, messages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = HistoryNode(message=_copy(message))
            node = child
        return node

    def _root(self, tools: Sequence[ToolSpec]) -> HistoryNode | None:
        return next((root for known, root in self._roots if known == list(tools)), None)


def message_key(message: Message) -> str:
    """Hash of role, text, images and tool calls, with arguments as JSON values: equal for equal messages.

    Clients add keys, drop empty ones, write arguments with other spaces, and omit the reasoning of earlier answers.
    """
    kept: dict[str, Any] = {"role": message.get("role"), "content": message_text(message.get("content"))}
    if digests := image_digests([message]):
        # With their places among the texts.
        kept["content"], kept["images"] = message["content"], digests
    if calls := message.get("tool_calls"):
        kept["calls"] = [_call_key(each) for each in calls]
    if message.get("role") == "tool":
        kept["id"] = message.get("tool_call_id")
    # Non-ASCII as escapes: a lone surrogate, which JSON allows, has no UTF-8.
    text = json.dumps(kept, sort_keys=True, ensure_ascii=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def message_text(content: Any) -> str:
    """The text of a message: a string, or the texts of its content parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _call_key(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return str(call)  # the renderer reports it
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    return [function.get("name"), parsed]


def _copy(message: Message) -> dict[str, Any]:
    """A copy that shares texts only."""
    return {key: value if isinstance(value, str) else deepcopy(value) for key, value in message.items()}
