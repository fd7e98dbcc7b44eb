"""Check of the first row of a prompt file, without a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.config import DataConfig
from rlscale.data.row_values import conversation_messages, prompt_value, row_label, row_metadata
from rlscale.data.rows import read_first_row
from rlscale.errors import DataError
from rlscale.models.chat_template import ChatTemplate, TemplateRefusal, TemplateUnknown

if TYPE_CHECKING:
    from rlscale.data.conversations import Messages


def check_first_row(config: DataConfig, *, learns_conversations: bool, template: ChatTemplate | None) -> None:
    """Checks that the first row has the fields of the config and that the chat template accepts it.

    Args:
        config: `prompt_data` and the names of its fields.
        learns_conversations: supervised training learns the answers of whole conversations.
        template: of the model; None: not known here, or not used.

    Raises:
        DataError: the file cannot be read, has no rows, or its first row cannot be used.
    """
    assert config.prompt_data is not None, "the caller has a file"
    row = read_first_row(config.prompt_data)
    value = conversation_messages(row, config) if learns_conversations else prompt_value(row, config)
    row_label(row, config)
    row_metadata(row, config)
    if template is None or isinstance(value, str):
        return

    def render(part: Messages, generation_prompt: bool) -> str:
        return template.render(part, generation_prompt=generation_prompt, arguments=config.apply_chat_template_kwargs)

    try:
        if learns_conversations:
            # Imported here: it imports numpy, which takes as long as all checks of most runs.
            from rlscale.data.conversations import render_conversation

            render_conversation(value, kind=config.loss_mask_type, render=render, end_token=template.eos_token)
        else:
            render(value, True)
    except TemplateUnknown:
        return
    except (TemplateRefusal, ValueError) as error:
        raise DataError(f"{row.place} must fit the chat template; {error}") from error
