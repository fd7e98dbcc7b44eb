"""Limits of the length of prompts: of the config, of the model, and of servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlscale.config import EngineKind, RolloutConfig
from rlscale.config.groups.rollout import SGLANG_SPARE_TOKENS
from rlscale.errors import count_noun

MAX_TOKEN_CHARS = 1024
"""No token of a tokenizer has more characters, for checks before one is loaded; in Qwen's the longest has 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Maximum number of tokens of a part of a row."""

    tokens: int
    name: str  # of the limit, in messages
    what: str = "prompts"  # limited part, in messages


def prompt_limit(rollout: RolloutConfig, positions: int | None) -> Limit | None:
    """The longest prompt: of `rollout.max_prompt_len`, and one that leaves room for a response. None: no limit.

    Of `rollout.max_context_len` a prompt leaves at least one token, since responses are cut to what is left; else it
    leaves `rollout.max_response_len` of the model's `positions`. Servers of SGLang reserve tokens of their context.
    """
    longest, context, response = rollout.max_prompt_len, rollout.max_context_len, rollout.max_response_len
    limits = [] if longest is None else [Limit(tokens=longest, name="rollout.max_prompt_len")]
    is_external = rollout.external or rollout.engine == EngineKind.external
    # Servers that the run starts have a longer context than its requests, if the model has the positions.
    has_all = rollout.engine in (EngineKind.embedded, EngineKind.scripted) and not is_external
    spare = 0 if has_all else SGLANG_SPARE_TOKENS
    left = 1 + (spare if is_external else 0)
    if context is not None:
        limits.append(Limit(tokens=context - left, name=f"rollout.max_context_len minus {count_noun(left, 'token')}"))
    if positions is not None and spare and (context is not None or longest is None):
        name = f"the model's {positions} positions minus {1 + spare} tokens, which SGLang reserves"
        limits.append(Limit(tokens=positions - 1 - spare, name=name))
    if positions is not None and context is None and longest is None:
        name = f"the model's {positions} positions minus rollout.max_response_len={response}"
        limits.append(Limit(tokens=positions - response, name=name))
    # Of equal limits the last one: the resolve step derives max_prompt_len = max_context_len - 1.
    return min(reversed(limits), key=lambda each: each.tokens, default=None)


def max_chars_per_token(vocabulary: Iterable[str]) -> int:
    """Characters of the longest token: a text has at least its characters divided by it as tokens."""
    return max(map(len, vocabulary), default=1)


def num_characters(prompt: str | Sequence[Mapping[str, Any]]) -> int:
    """Characters of a prompt, or of the contents of its messages."""
    texts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    return sum(map(len, texts))


def all_too_long(limit: Limit, number: int) -> str:
    """Why none of `number` rows can be used, and what to do: each exceeds `limit`."""
    rows = "its only row is" if number == 1 else f"all {number} rows are"
    key = limit.name.split()[0]
    fix = f"use shorter {limit.what}, or increase {key}" if key.startswith("rollout.") else f"use shorter {limit.what}"
    return f"{rows} longer than {limit.name} ({count_noun(limit.tokens, 'token')}); {fix}"
