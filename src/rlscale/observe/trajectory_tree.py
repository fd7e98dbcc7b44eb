"""Record of one trajectory for the report: its tree of turns, with messages, times and weight versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rlscale.images import IMAGE_TYPE, is_image_part
from rlscale.types import AGENT, REWARDS, Sample, SampleTurn

MAX_CHARS = 4000
"""Characters of one text that a record keeps; the rest is cut off with a note."""

MAX_TURNS = 300
"""Turns of one trajectory that a record keeps."""


def trajectory_tree(samples: Sequence[Sample], text_of: Callable[[int], str]) -> dict[str, Any]:
    """The record of the trajectory with these paths, as JSON values.

    Turns that two paths share are there once, with the number of the turn before them in `parent` (null: the prompt).
    `tokens` counts the tokens of a turn, `trained` those that the trainer learns from. `seconds` are those of the
    request that a turn answered, since the first request.

    Args:
        text_of: the text of a token, for turns whose messages are not known.
    """
    first = samples[0]
    turns: dict[int, dict[str, Any]] = {}
    for sample in samples:
        _add_path(turns, sample, first, text_of)
    messages: Sequence[Mapping[str, Any]] = first.prompt.messages
    start = first.turns[0] if first.turns else None
    if start is not None and start.messages and not start.sampled and not start.num_tokens:
        # The agent began with other messages than those of the row: the empty turn that has them is the prompt.
        messages = start.messages
        del turns[start.number]
        for each in turns.values():
            each["parent"] = None if each["parent"] == start.number else each["parent"]
    began_s = min((each["seconds"][0] for each in turns.values() if each["seconds"]), default=0.0)
    for each in turns.values():
        each["seconds"] = [round(second - began_s, 3) for second in each["seconds"]]
    kept = [turns[number] for number in sorted(turns)]
    return {
        "index": first.index,
        "group": first.group_index,
        "row": first.prompt.index,
        "status": str(first.status),
        "failure": None if first.failure is None else f"{first.failure.cause}: {first.failure.message}"[:MAX_CHARS],
        "reward": first.reward,
        "rewards": first.metadata.get(REWARDS),
        "label": None if first.prompt.label_text is None else _cut(first.prompt.label_text),
        "counts": first.metadata.get(AGENT),
        "prompt": [_shown(each) for each in messages] or [{"role": "prompt", "content": _cut(first.prompt.text)}],
        "prompt_tokens": first.prompt_len,
        "turns": kept[:MAX_TURNS],
        "num_turns": len(kept),
    }


def _add_path(turns: dict[int, dict[str, Any]], sample: Sample, first: Sample, text_of: Callable[[int], str]) -> None:
    start, parent = 0, None
    ids, has_own_prompt = sample.response_ids, sample.prompt.token_ids != first.prompt.token_ids
    for turn in sample.turns or _split_by_mask(sample):
        end = start + turn.num_tokens
        known = turns.get(turn.number)
        trained = int(sample.loss_mask[start:end].sum())
        if known is None:
            begins = has_own_prompt and parent is None
            shown = ids[start:end] if turn.num_tokens or not begins else sample.prompt.token_ids
            turns[turn.number] = {
                "number": turn.number,
                "parent": parent,
                "sampled": turn.sampled,
                # A path with its own prompt begins with an empty turn.
                "own_prompt": begins,
                "tokens": turn.num_tokens or (len(shown) if begins else 0),
                "trained": trained,
                "versions": sorted(set(sample.weight_versions[start:end].tolist())) if turn.sampled else [],
                "seconds": list(turn.interval_s or ()),
                "messages": [_shown(each) for each in turn.messages],
                "text": "" if turn.messages else _cut("".join(map(text_of, shown[:MAX_CHARS]))),
            }
        else:
            known["trained"] = max(known["trained"], trained)
        start, parent = end, turn.number


def _split_by_mask(sample: Sample) -> Iterator[SampleTurn]:
    """Turns of a sample that does not know them: parts with the same loss mask. Paths share none."""
    for position, (mask, same) in enumerate(groupby(sample.loss_mask.tolist())):
        number = sample.path * 2**20 + position
        yield SampleTurn(number=number, num_tokens=len(list(same)), sampled=bool(mask))


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a message that the report shows, with cut texts."""
    shown: dict[str, Any] = {"role": str(message.get("role", "?")), "content": _text_of_content(message.get("content"))}
    for name in ("reasoning_content", "name"):
        if message.get(name):
            shown[name] = _cut(str(message[name]))
    calls = message.get("tool_calls") or []
    if calls:
        shown["tool_calls"] = [_shown_call(call) for call in calls if isinstance(call, Mapping)]
    return shown


def _shown_call(call: Mapping[str, Any]) -> dict[str, str]:
    function = call.get("function")
    given = function if isinstance(function, Mapping) else call
    return {"name": str(given.get("name", "?"))[:200], "arguments": _cut(str(given.get("arguments", "")))}


def _text_of_content(content: Any) -> str:
    if isinstance(content, list):  # parts of Chat Completions
        content = "\n".join(map(_text_of_part, content))
    return _cut("" if content is None else str(content))


def _text_of_part(part: Any) -> str:
    if is_image_part(part):
        return f"[image {part.get(IMAGE_TYPE, '')}]"
    return str(part.get("text", part)) if isinstance(part, Mapping) else str(part)


def _cut(text: str) -> str:
    hidden = len(text) - MAX_CHARS
    return text if hidden <= 0 else f"{text[:MAX_CHARS]} ... ({hidden:,} more characters)"
