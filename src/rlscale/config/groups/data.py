"""Group `data`: training prompts and how many rollouts are made of them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


class LossMaskType(StrEnum):
    """Families of chat templates."""

    qwen = "qwen"
    qwen3 = "qwen3"
    distill_qwen = "distill_qwen"


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
        Field(
            min_length=1,
            description="Field of a row that holds the expected answer. None: prompts have no label; supervised "
            "training then learns the answers of whole conversations.",
        ),
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
    start_rollout_id: Annotated[
        int | None,
        Field(
            ge=0,
            description="Number of the first rollout, also of the data that it sees; the run still ends after rollout "
            "`data.num_rollout` - 1. None: the one after the checkpoint's, 0 without a checkpoint.",
        ),
    ] = None
    rollout_global_dataset: Annotated[
        bool,
        Field(
            description="Take prompts from `data.prompt_data`; false: from `data.data_source_path` alone, and "
            "`data.num_epoch` cannot be used."
        ),
    ] = True
    data_source_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own class of a prompt source, `package.module:name`, a `PromptSource` of "
            "`rlscale.protocols`. None: the one that comes with rlscale.",
        ),
    ] = None
    multimodal_keys: Annotated[
        dict[str, Any] | None,
        Field(
            description="Fields of a row with media, by kind, e.g. `{image: images}`; the prompt has `<image>` where "
            "each belongs. None: text only."
        ),
    ] = None
    tool_key: Annotated[
        str | None,
        Field(min_length=1, description="Field of a row with tool schemas, for the chat template. None: no tools."),
    ] = None
    loss_mask_type: Annotated[
        LossMaskType,
        Field(
            description="Which tokens of a whole conversation supervised training learns: the answers, as the chat "
            "template writes them. `qwen`: in the conversation as it is. `qwen3`: each as if it were the last one, so "
            "that its thinking stays. `distill_qwen`: the last one alone. Used with `data.label_key=null` and "
            "`data.apply_chat_template`, where `data.input_key` holds the messages."
        ),
    ] = LossMaskType.qwen
