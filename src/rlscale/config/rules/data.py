"""Rules about prompts and the length of the run."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from rlscale.architectures.family import find_family, load_families
from rlscale.config.groups.model import ModelBuild
from rlscale.config.groups.reward import RewardType
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import LoraSync, QkvFormat
from rlscale.config.problems import nearest, show
from rlscale.config.rules.conditions import is_sft, learns_conversations, uses_engines
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem, count_noun

MEDIA = ("image",)
_LATER = ("video", "audio")


@rule
def prompts_have_a_source(config: RunConfig) -> list[Problem]:
    if config.data.rollout_global_dataset or config.data.data_source_path is not None:
        return []
    rule = "be set with data.rollout_global_dataset=false"
    fix = "set data.data_source_path=<package.module:Class>, or data.rollout_global_dataset=true"
    return [Problem(path="data.data_source_path", rule=rule, value="null", fix=fix)]


@rule
def epochs_need_the_dataset(config: RunConfig) -> list[Problem]:
    """Without the dataset the length of an epoch is unknown."""
    data = config.data
    if data.rollout_global_dataset or data.num_epoch is None or data.num_rollout is not None:
        return []
    rule, fix = "be null with data.rollout_global_dataset=false", "set data.num_rollout instead"
    return [Problem(path="data.num_epoch", rule=rule, value=show(data.num_epoch), fix=fix)]


@rule
def first_rollout_is_in_the_run(config: RunConfig) -> list[Problem]:
    first, number = config.data.start_rollout_id, config.data.num_rollout
    if first is None or number is None or first < number:
        return []
    rule = f"be below data.num_rollout={number}"
    fix = f"the last rollout is {number - 1}; raise data.num_rollout, which counts from rollout 0"
    return [Problem(path="data.start_rollout_id", rule=rule, value=show(first), fix=fix)]


@rule
def media_need_the_chat_template(config: RunConfig) -> list[Problem]:
    fields, path = config.data.multimodal_keys, "data.multimodal_keys"
    if fields is None:
        return []
    problems = []
    for kind in sorted(fields.keys() - set(MEDIA)):
        found = nearest(kind, MEDIA)
        fix = f"did you mean {found}?" if found else "remove this key"
        rule = "have the key image only" + " (not supported yet: video and audio)" * (kind in _LATER)
        problems.append(Problem(path=path, rule=rule, value=kind, fix=fix))
    if not config.data.apply_chat_template:
        rule, fix = "be true with data.multimodal_keys", "set it; the chat template inserts the media"
        problems.append(Problem(path="data.apply_chat_template", rule=rule, value="false", fix=fix))
    return problems


@rule
def images_need_a_model_that_reads_them(config: RunConfig) -> list[Problem]:
    family = architecture_field(config.model, "model_type")
    if config.data.multimodal_keys is None or family is None or find_family(family).vision is not None:
        return []
    known = ", ".join(name for name, each in load_families().items() if each.vision is not None)
    rule, fix = f"be null with model.model_type={family}", f"choose a model of {known}, e.g. model=tiny_qwen3_vl"
    return [Problem(path="data.multimodal_keys", rule=rule, value=show(config.data.multimodal_keys), fix=fix)]


@rule
def images_need_their_features(config: RunConfig) -> list[Problem]:
    """Parts of a run that would lose the images of its samples, or compute other logprobs without them."""
    if config.data.multimodal_keys is None:
        return []
    return [
        Problem(
            path=path,
            rule=f"be {show(needed)} with data.multimodal_keys (not supported yet: {missing})",
            value=show(value),
            fix="remove it",
        )
        for path, (needed, missing) in _WITH_IMAGES.items()
        if (value := attrgetter(path)(config)) != needed
    ]


_PADDED = "features of images in padded rows"
_SAME_BITS = "a vision tower with the same bits in trainer and engine"

_WITH_IMAGES: dict[str, tuple[Any, str]] = {
    "buffer.url": (None, "images in groups of the rollout buffer"),
    "fsdp.context_parallel_size": (1, "parts of images on FSDP2"),
    "train.qkv_format": (QkvFormat.thd, _PADDED),
    "train.true_on_policy_mode": (False, _SAME_BITS),
}
"""Key -> the value that works with images, and what others need."""


@rule
def adapters_of_images_are_merged(config: RunConfig) -> list[Problem]:
    """The vision tower has adapters, too, unless they are named, and engines apply adapters to the decoder alone."""
    lora, engine = config.train.lora, config.rollout.engine
    if config.data.multimodal_keys is None or not lora.rank or lora.sync == LoraSync.merged:
        return []
    if engine == EngineKind.sglang:
        rule = "be merged with data.multimodal_keys and rollout.engine=sglang (not supported yet: its names of layers)"
        fix = "set train.lora.sync=merged"
    elif set(lora.target_modules or ("all",)) <= set(_DECODER_LAYERS):
        return []
    else:
        listed = ",".join(_DECODER_LAYERS)
        rule = "be merged with data.multimodal_keys (not supported yet: adapters of a vision tower in engines)"
        fix = f"set train.lora.sync=merged, or train.lora.target_modules=[{listed}]"
    return [Problem(path="train.lora.sync", rule=rule, value=show(lora.sync), fix=fix)]


_DECODER_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Layers whose names no vision tower has."""


@rule
def vision_towers_are_packed(config: RunConfig) -> list[Problem]:
    """A model that reads images has its own forward pass over packed samples, also in a run without images."""
    family, train = architecture_field(config.model, "model_type"), config.train
    if config.data.multimodal_keys is not None or family is None or find_family(family).vision is None:
        return []  # with images `images_need_their_features` reports the same
    wrong: list[tuple[str, str, object, str]] = []
    if train.qkv_format != QkvFormat.thd:
        wrong.append(("train.qkv_format", "thd", train.qkv_format, _PADDED))
    if train.true_on_policy_mode and not is_sft(config):
        wrong.append(("train.true_on_policy_mode", "false", True, _SAME_BITS))
    return [
        Problem(
            path=path,
            rule=f"be {needed} with model.model_type={family} (not supported yet: {missing})",
            value=show(value),
            fix="remove it, or choose a model without images",
        )
        for path, needed, value, missing in wrong
    ]


@rule
def sglang_reads_patches_of_qwen2_5_vl(config: RunConfig) -> list[Problem]:
    """SGLang takes rows of pixels of another width than that of 14 x 14 patches for finished features."""
    builds = config.model.build == ModelBuild.tiny_qwen2_5_vl
    if not builds or config.data.multimodal_keys is None or config.rollout.engine != EngineKind.sglang:
        return []
    rule = "be embedded with model.build=tiny_qwen2_5_vl, whose patches of 4 x 4 pixels SGLang does not read"
    fix = "set rollout=embedded, or model=tiny_qwen3_vl"
    return [Problem(path="rollout.engine", rule=rule, value="sglang", fix=fix)]


@rule
def weights_are_of_files(config: RunConfig) -> list[Problem]:
    files, weights = config.data.prompt_files, config.data.prompt_weights
    if weights is None or (files is not None and len(weights) == len(files) and min(weights) > 0):
        return []
    rule, fix = "be null without data.prompt_files", "remove it, or set data.prompt_files=[<file>,<file>]"
    if files is not None:
        rule = f"have {count_noun(len(files), 'number')} above 0, one for each entry of data.prompt_files"
        fix = "correct the numbers"
    return [Problem(path="data.prompt_weights", rule=rule, value=show(weights), fix=fix)]


@rule
def sources_have_known_rewards(config: RunConfig) -> list[Problem]:
    problems = []
    for source, name in config.data.reward_by_source.items():
        if name in list(RewardType):
            continue
        found = nearest(name, list(RewardType))
        fix = f"did you mean {found}?" if found else "choose one of them, or set reward.custom_path"
        rule = f"be one of {', '.join(RewardType)}"
        problems.append(Problem(path=f"data.reward_by_source.{source}", rule=rule, value=name, fix=fix))
    return problems


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("data.prompt_data",),
        when=lambda config: not config.data.rollout_global_dataset,
        why="data.rollout_global_dataset is false",
    ),
    IgnoredKey(
        names=("data.prompt_data",),
        when=lambda config: config.data.prompt_files is not None,
        why="data.prompt_files is set and takes precedence",
    ),
    IgnoredKey(
        names=("data.prompt_files", "data.prompt_weights"),
        when=lambda config: not config.data.rollout_global_dataset,
        why="data.rollout_global_dataset is false",
    ),
    IgnoredKey(
        names=("data.prompt_files", "data.prompt_weights", "data.on_bad_row", "data.reward_by_source"),
        when=lambda config: config.data.data_source_path is not None,
        why="data.data_source_path is the source of the prompts",
    ),
    IgnoredKey(
        names=("data.source_key",),
        when=lambda config: not config.data.reward_by_source and not config.data.teacher_by_source,
        why="data.reward_by_source and data.teacher_by_source are empty",
    ),
    IgnoredKey(
        names=("data.reward_by_source",),
        when=lambda config: config.reward.custom_path is not None or bool(config.reward.functions),
        why="reward.custom_path or reward.functions score every row",
    ),
    IgnoredKey(
        names=("data.reward_by_source",),
        when=lambda config: not uses_engines(config),
        why="the run has no responses to score",
    ),
    IgnoredKey(
        names=("data.num_epoch",),
        when=lambda config: config.data.num_rollout is not None,
        why="data.num_rollout is set and takes precedence",
    ),
    IgnoredKey(
        names=("data.apply_chat_template_kwargs",),
        when=lambda config: not config.data.apply_chat_template,
        why="data.apply_chat_template is false",
    ),
    IgnoredKey(
        names=("data.loss_mask_type",),
        when=lambda config: not is_sft(config),
        why="algo.loss_type is not sft_loss",
    ),
    IgnoredKey(
        names=("data.loss_mask_type",),
        when=lambda config: not learns_conversations(config),
        why="supervised training learns labels (data.label_key) instead of whole conversations",
    ),
)
