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
    qwen3_5 = "qwen3_5"
    distill_qwen = "distill_qwen"


class OnBadRow(StrEnum):
    """Reactions to a row of a prompt file that cannot be used."""

    error = "error"
    skip = "skip"


@dataclass(kw_only=True)
class DataConfig(ConfigGroup):
    """Training prompts and the length of the run."""

    # Files and fields.
    prompt_data: Annotated[str | None, Field(min_length=1)] = None
    """File of training prompts, `.jsonl`, `.jsonl.gz` or `.parquet`, or a glob such as `math/*.jsonl`. The suffix
    `@[start:stop:step]` selects rows as a slice of Python does, e.g. `@[-1000:]`. The prefix `builtin:` refers to data
    files included in rlscale. None: an error if `data.rollout_global_dataset` is true and `data.prompt_files` is null.
    """

    prompt_files: Annotated[list[str] | None, Field(min_length=1)] = None
    """Several prompt files or globs, each in the form of `data.prompt_data`, which it replaces. Without
    `data.prompt_weights` they are read as one file. None: only `data.prompt_data`.
    """

    prompt_weights: Annotated[list[float] | None, Field(min_length=1)] = None
    """Share of each entry of `data.prompt_files` in the prompts, e.g. `[3, 1]`; each file then has its own epochs. An
    epoch of the run is as many prompts as all files have. None: as the files have rows.
    """

    on_bad_row: OnBadRow = OnBadRow.error
    """Reaction to a row that cannot be used: no JSON, no prompt, an unknown role and so on. `error`: the run ends with
    the file and the row. `skip`: the row is dropped and counted in a warning. Rows that are too long are always
    dropped.
    """

    apply_chat_template: bool = False
    """Render prompts with the chat template of the tokenizer. A prompt that is a string becomes one user message."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, e.g. `enable_thinking: false`. No effect without
    `data.apply_chat_template`.
    """

    input_key: Annotated[str, Field(min_length=1)] = "input"
    """Field of a row with the prompt: a string, or messages with `role` and `content`. Here and in the other keys of
    fields `a.b` is the field b of an object a.
    """

    label_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with the expected answer, any JSON value, e.g. `reward_model.ground_truth`. None: prompts have no
    label, and supervised training learns the answers of whole conversations.
    """

    metadata_key: Annotated[str, Field(min_length=1)] = "metadata"
    """Field of a row with an object, or one as JSON text, that rewards and other functions get as `prompt.metadata` of
    a sample (in slime's form as `metadata`). Rows without it are allowed.
    """

    source_key: Annotated[str, Field(min_length=1)] = "data_source"
    """Field of a row with the name of its data set. Used by `data.reward_by_source` and `data.teacher_by_source`."""

    reward_by_source: dict[str, str] = field(default_factory=dict)
    """Built-in reward of the rows of a data set, by its name in `data.source_key`; the name may be a pattern, e.g.
    `{"openai/gsm8k": math, "aime*": dapo}`. `rm_type` in the metadata of a row takes precedence; other rows have
    `reward.type`.
    """

    teacher_by_source: dict[str, str] = field(default_factory=dict)
    """Servers of several teachers of `algo.opd_kl_coef`: the URL for the rows of a data set, by its name in
    `data.source_key`; the name may be a pattern, e.g. `{"openai/gsm8k": "http://10.0.0.1:30000"}`. Other rows have
    `model.teacher_url`, which explains the servers.
    """

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
    """Fields of a row with media by kind: `{image: images}`. The field has an image or a list: paths relative to the
    file, data URLs, base64 or bytes; `<image>` marks their places in the prompt. Their tokens count in every limit of
    length, and so do images that tools and environments return. Needs a model that reads images, `train=fsdp` and
    `data.apply_chat_template`. None: text only.
    """

    tool_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with tool schemas for the chat template: a list, or one as JSON text. Samples have them as
    `prompt.metadata["tools"]`. None: no tools.
    """

    # Supervised training.
    loss_mask_type: LossMaskType = LossMaskType.qwen
    """Answers of a conversation that supervised training learns, as rendered by the chat template. `qwen`: all answers
    of the conversation as it is. `qwen3`: each answer rendered as if it were the last one, which keeps its thinking.
    `qwen3_5`: all answers of the conversation as it is, found in its text by the generation prompt. `distill_qwen`:
    only the last answer. `step_loss_mask: 0` in an answer keeps it out of the loss (not in the one of `distill_qwen`).
    Used with
    `algo.loss_type=sft_loss`, `data.label_key=null` and `data.apply_chat_template`; `data.input_key` then contains the
    messages.
    """


def prompt_paths(data: DataConfig) -> tuple[str, ...]:
    """Paths of the training prompts, with their slices; empty without any."""
    if data.prompt_files is not None:
        return tuple(data.prompt_files)
    return () if data.prompt_data is None else (data.prompt_data,)


def prompts_name(data: DataConfig) -> str:
    """Name of the training prompts in messages."""
    paths = prompt_paths(data) or ("the prompt source",)
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
