"""Prompts from files: reads, renders, tokenises and filters them, and serves them in a reproducible order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, RolloutConfig
from rlscale.data.conversations import Conversation, render_conversation
from rlscale.data.length_filter import Limit, drop_too_long
from rlscale.data.rows import Row, read_rows
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.types import Prompt, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftTarget(StrEnum):
    """Target of supervised training in a row: its label, or all answers of its conversation."""

    labels = "labels"
    conversations = "conversations"


def sft_answers(prompt: Prompt) -> tuple[Turn, ...]:
    """Turns after the prompt in supervised training: those of the conversation, or the label without end token."""
    if prompt.turns:
        return prompt.turns
    return () if prompt.label is None else (Turn(prompt.label, True),)


def load_prompts(
    config: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None = None,
    sft_target: SftTarget | None = None,
) -> list[Prompt]:
    """Loads the prompts of `config.prompt_data` that are not too long, in file order.

    The limit is `rollout.max_prompt_len`, or, if unset, the model's `positions` minus `rollout.max_response_len`. In
    supervised training there is no response: the limit is `positions` for the prompt with its answers. Logs a warning
    with the number and rows of the dropped prompts.

    Args:
        config: the file and its fields.
        rollout: lengths.
        tokenizer: of the model.
        positions: maximum sequence length of the model; None: unlimited.
        sft_target: target of supervised training; None: engines generate the responses.

    Raises:
        DataError: a row is invalid (the message names it), or no prompt is left.
    """
    assert config.prompt_data is not None, "a rule requires data.prompt_data"
    rows = list(read_rows(config.prompt_data))
    if not rows:
        raise DataError(f"{config.prompt_data} must have at least one usable prompt, got none; it has no rows")
    turns: list[tuple[Turn, ...]] = [()] * len(rows)
    if sft_target == SftTarget.conversations:
        conversations = [_conversation(row, config, tokenizer) for row in rows]
        texts, turns = [each.prompt for each in conversations], [each.turns for each in conversations]
    else:
        texts = [_render(row, config, tokenizer) for row in rows]
    # A chat template already contains the special tokens.
    token_ids = _tokenize(texts, rows, tokenizer, add_special_tokens=not config.apply_chat_template)
    prompts = [_prompt(*parts, config=config) for parts in zip(rows, texts, token_ids, strict=True)]
    prompts = [replace(prompt, turns=learned) for prompt, learned in zip(prompts, turns, strict=True)]
    if sft_target is not None and positions is not None:
        what = "prompts with their labels" if sft_target == SftTarget.labels else "conversations"
        limit = Limit(tokens=positions, name="the model's positions", what=what)
        prompts = drop_too_long(prompts, _whole_lengths(prompts, rows, tokenizer), limit=limit, path=config.prompt_data)
    return _with_short_prompts(prompts, rollout, None if sft_target else positions, path=config.prompt_data)


def _with_short_prompts(
    prompts: list[Prompt], rollout: RolloutConfig, positions: int | None, *, path: str
) -> list[Prompt]:
    """Drops the prompts that are longer than a prompt may be."""
    if rollout.max_prompt_len is not None:
        limit = Limit(tokens=rollout.max_prompt_len, name="rollout.max_prompt_len")
    elif positions is not None:
        limit_name = f"the model's {positions} positions minus rollout.max_response_len={rollout.max_response_len}"
        limit = Limit(tokens=positions - rollout.max_response_len, name=limit_name)
    else:
        return prompts
    return drop_too_long(prompts, [len(prompt.token_ids) for prompt in prompts], limit=limit, path=path)


def _whole_lengths(prompts: Sequence[Prompt], rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each prompt with its learned answers."""
    answers = [(row, turn.text) for prompt, row in zip(prompts, rows, strict=True) for turn in sft_answers(prompt)]
    owners, texts = [row for row, _ in answers], [text for _, text in answers]
    ids = iter(_tokenize(texts, owners, tokenizer, add_special_tokens=False))
    # +1 for the end token after a label; a conversation already contains its end tokens.
    return [len(p.token_ids) + sum(len(next(ids)) for _ in sft_answers(p)) + (not p.turns) for p in prompts]


class FilePromptSource:
    """Serves the prompts of a file, epoch after epoch.

    Invariant: every epoch contains each row exactly once; with `rollout.shuffle` its order depends on `rollout.seed`
    and the number of the epoch alone.

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
        sft_target: SftTarget | None = None,
    ) -> None:
        self._prompts = load_prompts(config, rollout, tokenizer, positions=positions, sft_target=sft_target)
        self._seed, self._shuffle = rollout.seed, rollout.shuffle
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts; continues with the next epoch at the end of one."""
        prompts: list[Prompt] = []
        # Each pass takes the rest of the epoch at most.
        while len(prompts) < num_prompts:
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order(self._epoch)
            end = min(len(self), self._position + num_prompts - len(prompts))
            prompts += [self._prompts[i] for i in self._order[self._position : end]]
            self._position = end
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as JSON values."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`.

        Raises:
            ConfigError: the number of prompts differs, so the position would refer to other prompts.
        """
        if state["num_prompts"] != len(self):
            rule = f"have the {state['num_prompts']} prompts of the resumed run"
            fix = "resume with the same file, slice and rollout.max_prompt_len"
            raise ConfigError([Problem(path="data.prompt_data", rule=rule, value=f"{len(self)} prompts", fix=fix)])
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            # A new generator per epoch: a resumed run restores the order from the number of the epoch alone.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _render(row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Renders the prompt of a row, with the chat template if configured."""
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
        raise DataError(
            f"{row.place} must have a string under {config.input_key!r}, got a list of messages; set "
            "data.apply_chat_template=true"
        )
    try:
        return _templated(messages, config, tokenizer)
    except Exception as error:  # a template can raise any type; re-raised as DataError with the row
        raise DataError(f"{row.place} must fit the chat template; {type(error).__name__}: {error}") from error


def _templated(
    messages: Sequence[Mapping[str, Any]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation_prompt: bool = True,
) -> str:
    arguments = {"add_generation_prompt": generation_prompt} | config.apply_chat_template_kwargs
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)  # type: ignore[arg-type]
    assert isinstance(text, str), "tokenize=False returns text"
    return text


def _conversation(row: Row, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Splits the messages of a row into context and learned turns."""
    messages = row.get(config.input_key, setting="data.input_key")
    if not _are_messages(messages):
        raise DataError(
            f"{row.place} must have a list of messages with `role` and `content` under {config.input_key!r}, got "
            f"{type(messages).__name__}; correct data.input_key, or set data.label_key to the field of the answer"
        )

    def render(part: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        return _templated(part, config, tokenizer, generation_prompt=generation_prompt)

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
    except Exception as error:  # tokenizers raise plain Exception; the loop below finds the row
        for text, row in zip(texts, rows, strict=True):
            try:
                tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except Exception as cause:
                raise DataError(f"{row.place} must fit the tokenizer, got {text[:60]!r}; {cause}") from cause
        raise DataError(f"{rows[0].place} and the following rows must fit the tokenizer; {error}") from error


def _prompt(row: Row, text: str, token_ids: list[int], *, config: DataConfig) -> Prompt:
    if not token_ids:
        raise DataError(f"{row.place} must have a prompt of at least one token, got {text!r}; remove the row")
    # A missing field and null both mean no metadata.
    metadata = row.fields.get(config.metadata_key) or {}
    if not isinstance(metadata, dict):
        found = f"{type(metadata).__name__} under {config.metadata_key!r}"
        raise DataError(
            f"{row.place} must have an object as metadata, got {found}; correct data.metadata_key or the file"
        )
    return Prompt(index=row.index, text=text, token_ids=tuple(token_ids), label=_label(row, config), metadata=metadata)


def _label(row: Row, config: DataConfig) -> str | None:
    if config.label_key is None:
        return None
    label = row.get(config.label_key, setting="data.label_key")
    if not isinstance(label, str | int | float):
        found = f"{type(label).__name__} under {config.label_key!r}"
        raise DataError(f"{row.place} must have a string or number as label, got {found}; correct data.label_key")
    return str(label)
