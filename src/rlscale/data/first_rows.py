"""Checks of the first rows of prompt files, without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlscale.config import DataConfig, OnBadRow, prompt_paths
from rlscale.data.file_starts import first_rows
from rlscale.data.first_images import FirstImages
from rlscale.data.image_fields import check_markers, image_key
from rlscale.data.length_filter import MAX_TOKEN_CHARS, Limit, all_too_long, num_characters
from rlscale.data.row_values import conversation_messages, prompt_value, row_label, row_metadata, row_tools
from rlscale.data.rows import BadRowError, Row, no_usable_prompt
from rlscale.models.chat_template import ChatTemplate, TemplateRefusal, TemplateUnknown

if TYPE_CHECKING:
    from rlscale.data.conversations import Messages

CHECKED_ROWS, CHECKED_BYTES = 2000, 1 << 23
"""Rows and bytes of a path that are checked: the check takes less than a second."""

MAX_LONG_ROWS = 8
"""Most rows of a path that are searched for one that is short enough, if the checked ones are too long."""


CheckMetadata = Callable[[Row, Mapping[str, Any]], None]
"""Checks the metadata of a row; raises BadRowError."""


def check_first_rows(
    config: DataConfig,
    *,
    learns_conversations: bool,
    template: ChatTemplate | None,
    check_metadata: CheckMetadata | None = None,
    limit: Limit | None = None,
) -> None:
    """Checks that the first rows of each path have the fields of the config, and the first the chat template's form.

    With `data.on_bad_row=skip` only files are checked.

    Args:
        config: `prompt_data` or `prompt_files`, and the names of their fields.
        learns_conversations: supervised training learns the answers of whole conversations.
        template: of the model; None: not known here, or not used.
        check_metadata: further check of each row. None: there is none.
        limit: of prompts, which the tokens of their characters may not exceed in every row. None: there is none.

    Raises:
        DataError: a file cannot be read, has no rows, or a row cannot be used; or all rows are too long.
    """
    assert prompt_paths(config), "the caller has a file"
    key = image_key(config)
    for path in prompt_paths(config):
        is_first, images = True, None if key is None else FirstImages(key)
        num_rows, fits = 0, limit is None
        try:
            for row in first_rows(path, max_rows=CHECKED_ROWS, max_bytes=CHECKED_BYTES):
                value = conversation_messages(row, config) if learns_conversations else prompt_value(row, config)
                if key is not None and not isinstance(value, str):
                    check_markers(row, value, key)
                if images is not None:
                    images.check(row)
                row_label(row, config)
                metadata = row_metadata(row, config)
                if check_metadata is not None:
                    check_metadata(row, metadata)
                if is_first and template is not None and not isinstance(value, str):
                    _check_template(row, value, config, template, is_conversation=learns_conversations)
                is_first = False
                num_rows, fits = num_rows + 1, fits or not _is_too_long(value, limit)
            if limit is not None and not fits:
                _check_other_rows(path, config, limit, num_rows)
        except BadRowError:
            if config.on_bad_row == OnBadRow.error:
                raise


def _is_too_long(value: str | Messages, limit: Limit | None) -> bool:
    return limit is not None and num_characters(value) > limit.tokens * MAX_TOKEN_CHARS


def _check_other_rows(path: str, config: DataConfig, limit: Limit, num_rows: int) -> None:
    """Checks that a path has a prompt that is short enough, if none of its first `num_rows` is.

    Files of many more rows are left to the run.
    """
    # Imported here: it imports numpy, which takes as long as all checks of most runs.
    from rlscale.data.row_table import RowTable

    table = RowTable([path])
    if num_rows < len(table) <= MAX_LONG_ROWS and any(
        not _is_too_long(prompt_value(table.row(number), config), limit) for number in range(num_rows, len(table))
    ):
        return
    if len(table) <= max(num_rows, MAX_LONG_ROWS):
        raise no_usable_prompt(path, all_too_long(limit, len(table)))


def _check_template(
    row: Row, messages: Messages, config: DataConfig, template: ChatTemplate, *, is_conversation: bool
) -> None:
    """Checks that the chat template accepts the messages of a row."""
    tools = row_tools(row, config)
    arguments: dict[str, Any] = {**config.apply_chat_template_kwargs, **({} if tools is None else {"tools": tools})}

    def render(part: Messages, generation_prompt: bool) -> str:
        return template.render(part, generation_prompt=generation_prompt, arguments=arguments)

    try:
        if is_conversation:
            # Imported here: it imports numpy, which takes as long as all checks of most runs.
            from rlscale.data.conversations import render_conversation

            render_conversation(messages, kind=config.loss_mask_type, render=render, end_token=template.eos_token)
        else:
            render(messages, True)
    except TemplateUnknown:
        return
    except (TemplateRefusal, ValueError) as error:
        raise row.error(f"fit the chat template; {error}", reason="does not fit the chat template") from error
