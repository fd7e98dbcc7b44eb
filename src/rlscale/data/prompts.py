"""Prompts from files: read, rendered, tokenised, filtered, and handed out in a reproducible order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, RolloutConfig
from rlscale.data.conversations import Conversation, render_conversation
from rlscale.data.length_filter import Limit, keep_short
from rlscale.data.rows import Row, read_rows
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.types import Prompt, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Learned(StrEnum):
    """What supervised training learns of a row."""

    labels = "labels"
    conversations = "conversations"


def answers_of(prompt: Prompt) -> tuple[Turn, ...]:
    """What follows a prompt where its answer is learned: the turns of a conversation, or the label without an end."""
    if prompt.turns:
        return prompt.turns
    return () if prompt.label is None else (Turn(prompt.label, True),)


def load_prompts(
    config: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None = None,
    learns: Learned | None = None,
) -> list[Prompt]:
    """Every prompt of `config.prompt_data` that is not too long, in the order of the file.

    Too long is what exceeds `rollout.max_prompt_len`, or, where that is not set, what would leave no room for
    `rollout.max_response_len` in the model's `positions`. Where answers are learned there is no response, and too long
    is what exceeds the `positions` together with its answer. How many were dropped, and which, is logged as a warning.

    Args:
        config: the file and its fields.
        rollout: lengths.
        tokenizer: of the model.
        positions: of the model, in tokens; None: no limit of its own.
        learns: the answers in the rows that supervised training learns; None: engines answer.

    Raises:
        DataError: a broken row, which the message names, or no prompt is left.
    """
    assert config.prompt_data is not None, "a rule asks for data.prompt_data"
    rows = list(read_rows(config.prompt_data))
    if not rows:
        raise DataError(f"{config.prompt_data} must have at least one usable prompt, got none; it has no rows")
    turns: list[tuple[Turn, ...]] = [()] * len(rows)
    if learns == Learned.conversations:
        divided = [_conversation(row, config, tokenizer) for row in rows]
        texts, turns = [each.prompt for each in divided], [each.turns for each in divided]
    else:
        texts = [_render(row, config, tokenizer) for row in rows]
    # A chat template writes the special tokens itself.
    token_ids = _tokenize(texts, rows, tokenizer, add_special_tokens=not config.apply_chat_template)
    prompts = [_prompt(*parts, config=config) for parts in zip(rows, texts, token_ids, strict=True)]
    prompts = [replace(prompt, turns=rest) for prompt, rest in zip(prompts, turns, strict=True)]
    if learns is not None and positions is not None:
        what = "prompts with their labels" if learns == Learned.labels else "conversations"
        limit = Limit(tokens=positions, name="the model's positions", what=what)
        prompts = keep_short(prompts, _whole_lengths(prompts, rows, tokenizer), limit=limit, path=config.prompt_data)
    return _with_short_prompts(prompts, rollout, None if learns else positions, path=config.prompt_data)


def _with_short_prompts(
    prompts: list[Prompt], rollout: RolloutConfig, positions: int | None, *, path: str
) -> list[Prompt]:
    """The prompts that are no longer than a prompt may be."""
    if rollout.max_prompt_len is not None:
        limit = Limit(tokens=rollout.max_prompt_len, name="rollout.max_prompt_len")
    elif positions is not None:
        room = f"what {rollout.max_response_len} tokens of a response leave of the model's {positions} positions"
        limit = Limit(tokens=positions - rollout.max_response_len, name=room)
    else:
        return prompts
    return keep_short(prompts, [len(prompt.token_ids) for prompt in prompts], limit=limit, path=path)


def _whole_lengths(prompts: Sequence[Prompt], rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each prompt with the answers that are learned."""
    answers = [(row, turn.text) for prompt, row in zip(prompts, rows, strict=True) for turn in answers_of(prompt)]
    places, texts = [row for row, _ in answers], [text for _, text in answers]
    ids = iter(_tokenize(texts, places, tokenizer, add_special_tokens=False))
    # A label is followed by an end token; a conversation has its own.
    return [len(p.token_ids) + sum(len(next(ids)) for _ in answers_of(p)) + (not p.turns) for p in prompts]


class FilePromptSource:
    """The prompts of a file, epoch after epoch.

    Invariant: between two prompts of one row all other rows come once; with `rollout.shuffle` each epoch has an order
    of its own, which depends on `rollout.seed` and the number of the epoch alone.

    Example:
        source = FilePromptSource(config.data, config.rollout, tokenizer)
        source.take(16)
        state = source.state_dict()  # {"epoch": 0, "position": 16, "num_prompts": 9744}
    """

    def __init__(
        self,
        config: DataConfig,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        positions: int | None = None,
        learns: Learned | None = None,
    ) -> None:
        self._prompts = load_prompts(config, rollout, tokenizer, positions=positions, learns=learns)
        self._seed, self._shuffle = rollout.seed, rollout.shuffle
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; goes on into the next epoch where one ends."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            end = min(len(self), self._position + num_prompts - len(taken))
            taken += [self._prompts[i] for i in self._order[self._position : end]]
            self._position = end
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from `state_dict`.

        Raises:
            ConfigError: the state belongs to another number of prompts, so its position means something else here.
        """
        if state["num_prompts"] != len(self):
            rule = f"have the {state['num_prompts']} prompts of the run that is resumed"
            fix = "resume with the same file, slice and rollout.max_prompt_len"
            raise ConfigError([Problem(path="data.prompt_data", rule=rule, value=f"{len(self)} prompts", fix=fix)])
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _render(row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a row's prompt, with the chat template if it is asked for."""
    value = row.get(config.input_key, setting="data.input_key")
    if isinstance(value, str) and not config.apply_chat_template:
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not _are_messages(messages):
        raise DataError(
            f"{row.place} must have a string or a list of messages with `role` and `content` under "
            f"{config.input_key!r}, got {type(value).__name__}; correct data.input_key or the file"
        )
    if not config.apply_chat_template:
        raise DataError(f"{row.place} must hold a string, got a list of messages; set data.apply_chat_template=true")
    try:
        return _templated(messages, config, tokenizer)
    except Exception as error:  # a template raises what it likes; the row is added and it goes on as DataError
        raise DataError(f"{row.place} must fit the chat template; {type(error).__name__}: {error}") from error


def _templated(
    messages: Sequence[Mapping[str, Any]], config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, asks: bool = True
) -> str:
    arguments = {"add_generation_prompt": asks} | config.apply_chat_template_kwargs
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)  # type: ignore[arg-type]
    assert isinstance(text, str), "tokenize=False gives text"
    return text


def _conversation(row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """A row's messages, divided into what is read and what is learned."""
    messages = row.get(config.input_key, setting="data.input_key")
    if not _are_messages(messages):
        raise DataError(
            f"{row.place} must have a list of messages with `role` and `content` under {config.input_key!r}, got "
            f"{type(messages).__name__}; correct data.input_key, or name the field of the answer in data.label_key"
        )

    def render(part: Sequence[Mapping[str, Any]], asks: bool) -> str:
        return _templated(part, config, tokenizer, asks=asks)

    try:
        return render_conversation(
            messages, kind=config.loss_mask_type, render=render, end_token=str(tokenizer.eos_token)
        )
    except Exception as error:  # as above
        raise DataError(f"{row.place} must fit the chat template; {type(error).__name__}: {error}") from error


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _tokenize(
    texts: Sequence[str], rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> list[list[int]]:
    if not texts:
        return []
    try:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        return ids
    except Exception as error:  # tokenizers raise plain Exception; found again below, with its row
        for text, row in zip(texts, rows, strict=True):
            try:
                tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except Exception as cause:
                raise DataError(f"{row.place} must fit the tokenizer, got {text[:60]!r}; {cause}") from cause
        raise DataError(f"{rows[0].place} and the rows after it must fit the tokenizer; {error}") from error


def _prompt(row: Row, text: str, token_ids: list[int], *, config: DataConfig) -> Prompt:
    if not token_ids:
        raise DataError(f"{row.place} must have a prompt of at least one token, got {text!r}; remove the row")
    metadata = row.fields.get(config.metadata_key) or {}
    if not isinstance(metadata, dict):
        found = f"{type(metadata).__name__} under {config.metadata_key!r}"
        raise DataError(f"{row.place} must hold an object, got {found}; correct data.metadata_key or the file")
    return Prompt(index=row.index, text=text, token_ids=tuple(token_ids), label=_label(row, config), metadata=metadata)


def _label(row: Row, config: DataConfig) -> str | None:
    if config.label_key is None:
        return None
    label = row.get(config.label_key, setting="data.label_key")
    if not isinstance(label, str | int | float):
        found = f"{type(label).__name__} under {config.label_key!r}"
        raise DataError(f"{row.place} must have a string or number as label, got {found}; correct data.label_key")
    return str(label)
