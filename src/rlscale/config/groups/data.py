"""Group `data`: training prompts and the length of the run."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class LossMaskType(StrEnum):
    """Loss masks of conversations, by family of chat templates."""

    qwen = "qwen"
    qwen3 = "qwen3"
    distill_qwen = "distill_qwen"


@dataclass(kw_only=True)
class DataConfig(ConfigGroup):
    """Training prompts and the length of the run."""

    # Files and fields.
    prompt_data: Annotated[str | None, Field(min_length=1)] = None
    """File of training prompts, `.jsonl` or `.parquet`. The suffix `@[a:b]` selects rows a to b-1. The prefix
    `builtin:` refers to data files included in rlscale. None: an error if `data.rollout_global_dataset` is true.
    """

    apply_chat_template: bool = False
    """Render prompts with the chat template of the tokenizer. A prompt that is a string becomes one user message."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, e.g. `enable_thinking: false`. No effect without
    `data.apply_chat_template`.
    """

    input_key: Annotated[str, Field(min_length=1)] = "input"
    """Field of a row with the prompt."""

    label_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with the expected answer. None: prompts have no label, and supervised training learns the answers
    of whole conversations.
    """

    metadata_key: Annotated[str, Field(min_length=1)] = "metadata"
    """Field of a row with an object that is copied to the metadata of the sample. Rows without it are allowed."""

    # Length of the run.
    num_rollout: Annotated[int | None, Field(ge=0)] = None
    """Number of rollouts of the run; each is generation, training and weight sync. 0: evaluate only. None: computed
    from `data.num_epoch`. Takes precedence over `data.num_epoch`.
    """

    num_epoch: Annotated[int | None, Field(gt=0)] = None
    """Number of passes over the training prompts: the run has (prompts // `batch.rollout_batch_size`) *
    `data.num_epoch` rollouts. None: `data.num_rollout` must be set. No effect with `data.num_rollout`.
    """

    start_rollout_id: Annotated[int | None, Field(ge=0)] = None
    """Number of the first rollout, which also sets the position in the data. The last rollout is `data.num_rollout` - 1
    as usual. None: the rollout after the checkpoint, or 0 without a checkpoint.
    """

    # Other sources and media.
    rollout_global_dataset: bool = True
    """Read prompts from `data.prompt_data`. false: `data.data_source_path` is the only source, and `data.num_epoch`
    cannot be used.
    """

    data_source_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own prompt source, `package.module:name`: a class created with the config and the tokenizer, a
    `PromptSource` of `rlscale.protocols`; or a class of slime's form, created with `args`. None: the built-in source.
    """

    multimodal_keys: dict[str, Any] | None = None
    """Fields of a row with media by kind, e.g. `{image: images}`; `<image>` marks their places in the prompt. None:
    text only.
    """

    tool_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with tool schemas for the chat template. None: no tools."""

    # Supervised training.
    loss_mask_type: LossMaskType = LossMaskType.qwen
    """Answers of a conversation that supervised training learns, as rendered by the chat template. `qwen`: all answers
    of the conversation as it is. `qwen3`: each answer rendered as if it were the last one, which keeps its thinking.
    `distill_qwen`: only the last answer. Used with `algo.loss_type=sft_loss`, `data.label_key=null` and
    `data.apply_chat_template`; `data.input_key` then contains the messages.
    """
