"""Group `data`: training prompts and how many rollouts are made of them."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.group import ConfigGroup


@dataclass(kw_only=True)
class DataConfig(ConfigGroup):
    """Training prompts and the length of the run."""

    prompt_data: Annotated[
        str | None,
        Field(
            min_length=1,
            description="File of training prompts, `.jsonl` or `.parquet`; `@[a:b]` at the end takes rows a to b-1; "
            "`builtin:` at the beginning means the data files that come with rlscale. None is refused.",
        ),
    ] = None
    apply_chat_template: Annotated[
        bool,
        Field(description="Render prompts with the tokenizer's chat template; a string becomes one user message."),
    ] = False
    apply_chat_template_kwargs: Annotated[
        dict[str, Any],
        Field(description="Extra arguments of the chat template, e.g. `enable_thinking: false`."),
    ] = field(default_factory=dict)
    input_key: Annotated[str, Field(min_length=1, description="Field of a row that holds the prompt.")] = "input"
    label_key: Annotated[
        str | None,
        Field(min_length=1, description="Field of a row that holds the expected answer. None: prompts have no label."),
    ] = None
    metadata_key: Annotated[
        str,
        Field(
            min_length=1, description="Field of a row whose object is copied to the sample's metadata; may be absent."
        ),
    ] = "metadata"
    num_rollout: Annotated[
        int | None,
        Field(
            ge=0,
            description="Rollouts of the run, each generate, train, sync. 0: evaluate only. None: `data.num_epoch` "
            "decides; wins over it when both are set.",
        ),
    ] = None
    num_epoch: Annotated[
        int | None,
        Field(
            gt=0,
            description="Passes over the training prompts: (prompts // `batch.rollout_batch_size`) * this many "
            "rollouts. None: `data.num_rollout` decides.",
        ),
    ] = None
