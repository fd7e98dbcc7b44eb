"""Prompts from files: reads, renders, tokenises and filters them, and serves them in a reproducible order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, EngineKind, RolloutConfig
from rlscale.config.groups.rollout import SGLANG_SPARE_TOKENS
from rlscale.data.conversations import Conversation, render_conversation
from rlscale.data.length_filter import Limit, drop_too_long
from rlscale.data.row_values import conversation_messages, prompt_value, row_label, row_metadata
from rlscale.data.rows import Row, read_rows
from rlscale.errors import ConfigError, DataError, Problem, count_noun
from rlscale.types import ConversationPart, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftTarget(StrEnum):
    """Target of supervised training in a row: its label, or all answers of its conversation."""

    labels = "labels"
    conversations = "conversations"


def sft_answers(prompt: Prompt) -> tuple[ConversationPart, ...]:
    """Turns after the prompt in supervised training: those of the conversation, or the label without end token."""
    if prompt.turns:
        return prompt.turns
    return () if prompt.label is None else (ConversationPart(prompt.label, True),)


def load_prompts(
    config: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None = None,
    sft_target: SftTarget | None = None,
) -> list[Prompt]:
    """Loads the prompts of `config.prompt_data` that are not too long, in file order.

    See `prompt_limit`. In supervised training there is no response: the limit is that of the model and of
    `rollout.max_context_len` for the prompt with its answers. Logs a warning with the number and rows of the dropped
    prompts.

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
    turns: list[tuple[ConversationPart, ...]] = [()] * len(rows)
    if sft_target == SftTarget.conversations:
        conversations = [_conversation(row, config, tokenizer) for row in rows]
        texts, turns = [each.prompt for each in conversations], [each.turns for each in conversations]
    else:
        texts = [_render(row, config, tokenizer) for row in rows]
    # A chat template already contains the special tokens.
    token_ids = _tokenize(texts, rows, tokenizer, add_special_tokens=not config.apply_chat_template)
    prompts = [_prompt(*parts, config=config) for parts in zip(rows, texts, token_ids, strict=True)]
    prompts = [replace(prompt, turns=learned) for prompt, learned in zip(prompts, turns, strict=True)]
    whole = _sample_limit(rollout, positions, sft_target)
    if whole is not None:
        prompts = drop_too_long(prompts, _whole_lengths(prompts, rows, tokenizer), limit=whole, path=config.prompt_data)
    limit = prompt_limit(rollout, None if sft_target else positions)
    if limit is None:
        return prompts
    return drop_too_long(prompts, [len(prompt.token_ids) for prompt in prompts], limit=limit, path=config.prompt_data)


def prompt_limit(rollout: RolloutConfig, positions: int | None) -> Limit | None:
    """The longest prompt: of `rollout.max_prompt_len`, and one that leaves room for a response. None: no limit.

    Of `rollout.max_context_len` a prompt leaves at least one token, since responses are cut to what is left; else it
    leaves `rollout.max_response_len` of the model's `positions`. Servers of SGLang reserve tokens of their context.
    """
    longest, context, response = rollout.max_prompt_len, rollout.max_context_len, rollout.max_response_len
    limits = [] if longest is None else [Limit(tokens=longest, name="rollout.max_prompt_len")]
    is_external = rollout.external or rollout.engine == EngineKind.external
    # Servers that the run starts have a longer context than its requests, if the model has the positions.
    spare = 0 if rollout.engine == EngineKind.embedded and not is_external else SGLANG_SPARE_TOKENS
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


def _sample_limit(rollout: RolloutConfig, positions: int | None, sft_target: SftTarget | None) -> Limit | None:
    """The longest prompt with its learned answers, in supervised training; None: no limit."""
    if sft_target is None:
        return None
    what = "prompts with their labels" if sft_target == SftTarget.labels else "conversations"
    context = rollout.max_context_len
    if context is not None and (positions is None or context < positions):
        return Limit(tokens=context, name="rollout.max_context_len", what=what)
    return None if positions is None else Limit(tokens=positions, name="the model's positions", what=what)


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

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts, in the order of the file."""
        return self._prompts

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
    value = prompt_value(row, config)
    if isinstance(value, str):
        return value
    try:
        return _templated(value, config, tokenizer)
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
    messages = conversation_messages(row, config)

    def render(part: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        return _templated(part, config, tokenizer, generation_prompt=generation_prompt)

    try:
        return render_conversation(
            messages, kind=config.loss_mask_type, render=render, end_token=str(tokenizer.eos_token)
        )
    except Exception as error:  # as above
        raise DataError(f"{row.place} must fit the chat template; {type(error).__name__}: {error}") from error


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
    label, metadata = row_label(row, config), row_metadata(row, config)
    return Prompt(index=row.index, text=text, token_ids=tuple(token_ids), label=label, metadata=metadata)
