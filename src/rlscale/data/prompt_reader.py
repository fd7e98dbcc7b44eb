"""Prompts of rows: values, chat template, tokens and limits of length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, OnBadRow
from rlscale.data.conversations import Conversation, render_conversation
from rlscale.data.image_fields import check_markers, image_key
from rlscale.data.length_filter import Limit, max_chars_per_token, num_characters
from rlscale.data.row_images import row_images, with_image_parts
from rlscale.data.row_values import conversation_messages, prompt_value, row_label, row_metadata, row_tools
from rlscale.data.rows import BadRowError, Row
from rlscale.images import Image
from rlscale.models.image_processor import ImageProcessor
from rlscale.types import ConversationPart, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)


class SftTarget(StrEnum):
    """Target of supervised training in a row: its label, or all answers of its conversation."""

    labels = "labels"
    conversations = "conversations"


def sft_answers(prompt: Prompt) -> tuple[ConversationPart, ...]:
    """Turns after the prompt in supervised training: those of the conversation, or the label without end token."""
    if prompt.turns:
        return prompt.turns
    label = prompt.label_text
    return () if label is None else (ConversationPart(label, True),)


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedRow:
    """A row that gives no prompt: a bad one, or one that is too long."""

    number: int  # of the row in the table
    index: int  # of the row among those of the files
    reason: str
    limit: Limit | None = None  # the limit that it exceeds
    message: str = ""  # of a bad row


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingLimits:
    """Limits of a prompt, and of a prompt with the answers that supervised training learns. None: any length."""

    prompt: Limit | None = None
    whole: Limit | None = None


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A row that is rendered and not yet tokenised."""

    number: int
    row: Row
    text: str
    label: Any
    metadata: dict[str, Any]
    turns: tuple[ConversationPart, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    images: tuple[Image, ...] = ()


class PromptReader:
    """Makes prompts of rows.

    A row with more characters than a limit allows is dropped before the template and the tokenizer, which would take
    minutes and gigabytes for a row of 50 MB.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limits: ReadingLimits,
        sft_target: SftTarget | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        """Args:
        processor: of the images of `data.multimodal_keys`.
        """
        self._processor = processor
        self._config, self._tokenizer = config, tokenizer
        self._limits, self._sft_target = limits, sft_target

    def read(self, numbers: Iterable[int], row: Callable[[int], Row]) -> list[Prompt | DroppedRow]:
        """The prompts of rows of a table, in the order of `numbers`.

        Args:
            numbers: of rows of the table.
            row: reads a row of the table.

        Raises:
            BadRowError: with `data.on_bad_row=error`, a row cannot be used.
        """
        found: dict[int, Prompt | DroppedRow] = {}
        drafts: list[_Draft] = []
        ordered = list(numbers)
        for place, number in enumerate(ordered):
            drafted = self._checked(number, row)
            if isinstance(drafted, DroppedRow):
                found[place] = drafted
            else:
                found[place] = DroppedRow(number=number, index=0, reason="")  # replaced below
                drafts.append(drafted)
        made = iter(self._make(drafts))
        return [next(made) if isinstance(each, DroppedRow) and not each.reason else each for each in found.values()]

    def _checked(self, number: int, row: Callable[[int], Row]) -> _Draft | DroppedRow:
        """The draft of a row, or the dropped row if it is bad and such rows are skipped."""
        try:
            return self._draft(number, row(number))
        except BadRowError as error:
            if self._config.on_bad_row == OnBadRow.error:
                raise
            return DroppedRow(number=number, index=number, reason=error.reason, message=str(error))

    def _draft(self, number: int, row: Row) -> _Draft | DroppedRow:
        config, is_talk = self._config, self._sft_target == SftTarget.conversations
        value = conversation_messages(row, config) if is_talk else prompt_value(row, config)
        label, metadata = row_label(row, config), row_metadata(row, config)
        limit = self._exceeded(value, label)
        if limit is not None:
            return DroppedRow(number=number, index=row.index, reason=f"longer than {limit.name}", limit=limit)
        if isinstance(value, str):
            return _Draft(number=number, row=row, text=value, label=label, metadata=metadata)
        tools, images = row_tools(row, config), self._images(row, value)
        try:
            if is_talk:
                talk = self._conversation(value, tools)
                text, turns = talk.prompt, self._expand_messages(talk, images)
            else:
                text, turns = self._render(value, True, tools), ()
        except Exception as error:  # a template can raise any type; re-raised with the row
            rule = f"fit the chat template; {type(error).__name__}: {error}"
            raise row.error(rule, reason="does not fit the chat template") from error
        # Supervised training has its conversation in `turns`.
        messages = () if is_talk else tuple(value)
        return _Draft(
            number=number,
            row=row,
            text=text,
            label=label,
            metadata=metadata,
            turns=turns,
            messages=messages,
            images=images,
        )

    def _images(self, row: Row, messages: Sequence[Mapping[str, Any]]) -> tuple[Image, ...]:
        """The images of a row, each with a place in its messages."""
        key = image_key(self._config)
        if self._processor is None or key is None:
            return ()
        images = row_images(row, key, self._processor)
        check_markers(row, messages, key)
        return images

    def _exceeded(self, value: str | Sequence[Mapping[str, Any]], label: Any) -> Limit | None:
        """The limit that a row exceeds by its characters alone; None: it has to be tokenised."""
        num_chars, limits = num_characters(value), self._limits
        if self._sft_target != SftTarget.conversations and _exceeds(num_chars, limits.prompt, self._chars_per_token):
            return limits.prompt
        whole = num_chars + (len(str(label)) if self._sft_target == SftTarget.labels else 0)
        return limits.whole if _exceeds(whole, limits.whole, self._chars_per_token) else None

    @cached_property
    def _chars_per_token(self) -> int:
        return max_chars_per_token(self._tokenizer.get_vocab())

    def _render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, tools: list[Any] | None) -> str:
        arguments = {"add_generation_prompt": generation_prompt} | self._config.apply_chat_template_kwargs
        if tools is not None:
            arguments["tools"] = tools
        messages = messages if self._processor is None else with_image_parts(messages)
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)  # type: ignore[arg-type]
        assert isinstance(text, str), "tokenize=False returns text"
        return text

    def _conversation(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> Conversation:
        """Splits the messages of a row into context and learned turns."""
        return render_conversation(
            messages,
            kind=self._config.loss_mask_type,
            render=lambda part, generation_prompt: self._render(part, generation_prompt, tools),
            end_token=str(self._tokenizer.eos_token),
        )

    def _make(self, drafts: Sequence[_Draft]) -> list[Prompt | DroppedRow]:
        # A chat template already contains the special tokens.
        special = not self._config.apply_chat_template
        ids = self._tokenize([(each, each.text) for each in drafts], add_special_tokens=special)
        found = [self._prompt(draft, tokens) for draft, tokens in zip(drafts, ids, strict=True)]
        return self._within_limits(found, drafts)

    def _prompt(self, draft: _Draft, token_ids: list[int] | BadRowError) -> Prompt | DroppedRow:
        if not isinstance(token_ids, BadRowError) and not token_ids:
            rule = f"have a prompt of at least one token, got {draft.text[:60]!r}; remove the row"
            token_ids = draft.row.error(rule, reason="empty prompt")
        elif not isinstance(token_ids, BadRowError) and self._processor is not None:
            token_ids = self._expanded(draft, token_ids)
        if isinstance(token_ids, BadRowError):
            return self._bad(draft, token_ids)
        return Prompt(
            index=draft.row.index,
            text=draft.text,
            token_ids=tuple(token_ids),
            label=draft.label,
            metadata=draft.metadata,
            turns=draft.turns,
            messages=draft.messages,
            images=draft.images,
        )

    def _expand_messages(self, talk: Conversation, images: Sequence[Image]) -> tuple[ConversationPart, ...]:
        """Turns whose texts have as many placeholders for each image as it has features."""
        if self._processor is None:
            return talk.turns
        layout = self._processor.layout
        placeholder = str(self._tokenizer.convert_ids_to_tokens(layout.image_token))
        found = sum(text.count(placeholder) for text in (talk.prompt, *(turn.text for turn in talk.turns)))
        if found != len(images):
            raise ValueError(
                f"a conversation must have one placeholder for each of its {len(images)} images, got {found}"
            )
        left = iter(images[talk.prompt.count(placeholder) :])
        turns = []
        for turn in talk.turns:
            first, *others = turn.text.split(placeholder)
            # Each further piece follows the placeholder of one image.
            pieces = [placeholder * layout.num_tokens(next(left).grid) + text for text in others]
            turns.append(ConversationPart(first + "".join(pieces), turn.is_learned))
        return tuple(turns)

    def _expanded(self, draft: _Draft, token_ids: list[int]) -> list[int] | BadRowError:
        """Tokens with as many placeholders for each image as it has features."""
        assert self._processor is not None, "the caller has one"
        layout, images = self._processor.layout, draft.images
        if draft.turns:  # they have the other images
            images = images[: token_ids.count(layout.image_token)]
        try:
            return list(layout.expand(token_ids, [image.grid for image in images]))
        except ValueError as error:
            return draft.row.error(f"have images where its text has placeholders; {error}", reason="placeholders")

    def _within_limits(
        self, found: Sequence[Prompt | DroppedRow], drafts: Sequence[_Draft]
    ) -> list[Prompt | DroppedRow]:
        """Drops the prompts that exceed a limit, first those that do so with their learned answers."""
        limits, result = self._limits, list(found)
        kept = [place for place, each in enumerate(result) if isinstance(each, Prompt)]
        if limits.whole is not None:
            prompts = [each for each in result if isinstance(each, Prompt)]
            answers = [[(drafts[i], turn.text) for turn in sft_answers(p)] for i, p in zip(kept, prompts, strict=True)]
            ids = iter(self._tokenize([each for row in answers for each in row], add_special_tokens=False))
            for place, prompt, texts in zip(kept, prompts, answers, strict=True):
                parts = [next(ids) for _ in texts]
                bad = next((part for part in parts if isinstance(part, BadRowError)), None)
                # +1 for the end token after a label; a conversation already contains its end tokens.
                num = len(prompt.token_ids) + (not prompt.turns)
                num += sum(len(part) for part in parts if not isinstance(part, BadRowError))
                if bad is not None:
                    result[place] = self._bad(drafts[place], bad)
                elif num > limits.whole.tokens:
                    result[place] = _too_long(drafts[place], limits.whole)
        for place, each in enumerate(result):
            if isinstance(each, Prompt) and limits.prompt is not None and len(each.token_ids) > limits.prompt.tokens:
                result[place] = _too_long(drafts[place], limits.prompt)
        return result

    def _bad(self, draft: _Draft, error: BadRowError) -> DroppedRow:
        if self._config.on_bad_row == OnBadRow.error:
            raise error
        return DroppedRow(number=draft.number, index=draft.row.index, reason=error.reason, message=str(error))

    def _tokenize(
        self, texts: Sequence[tuple[_Draft, str]], *, add_special_tokens: bool
    ) -> list[list[int] | BadRowError]:
        """Tokens of each text, or the error of its row."""
        if not texts:
            return []
        try:
            ids: list[list[int] | BadRowError] = self._tokenizer(
                [text for _, text in texts], add_special_tokens=add_special_tokens
            )["input_ids"]
            return ids
        except Exception:  # tokenizers raise plain Exception; one by one, each row has its own
            _logger.debug("tokenizing %d texts one by one", len(texts), exc_info=True)
        found: list[list[int] | BadRowError] = []
        for draft, text in texts:
            try:
                found.append(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
            except Exception as cause:
                error = draft.row.error(
                    f"fit the tokenizer, got {text[:60]!r}; {cause}", reason="does not fit the tokenizer"
                )
                error.__cause__ = cause
                found.append(error)
        return found


def _exceeds(num_chars: int, limit: Limit | None, chars_per_token: int) -> bool:
    return limit is not None and num_chars > limit.tokens * chars_per_token


def _too_long(draft: _Draft, limit: Limit) -> DroppedRow:
    return DroppedRow(number=draft.number, index=draft.row.index, reason=f"longer than {limit.name}", limit=limit)
