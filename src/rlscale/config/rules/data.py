"""Rules about where prompts come from and which rollouts are made."""

from __future__ import annotations

from rlscale.config.errors import nearest, show
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("data.rollout_global_dataset", "data.data_source_path")
def prompts_have_a_source(config: RunConfig) -> list[Problem]:
    if config.data.rollout_global_dataset or config.data.data_source_path is not None:
        return []
    fix = "set data.data_source_path=<package.module:Class>, or data.rollout_global_dataset=true"
    rule_text = "be set with data.rollout_global_dataset=false"
    return [Problem(path="data.data_source_path", rule=rule_text, value="null", fix=fix)]


@rule("data.rollout_global_dataset", "data.num_epoch", "data.num_rollout")
def epochs_need_the_dataset(config: RunConfig) -> list[Problem]:
    """Without the data set nobody knows how long an epoch is."""
    data = config.data
    if data.rollout_global_dataset or data.num_epoch is None or data.num_rollout is not None:
        return []
    rule_text = "be null with data.rollout_global_dataset=false"
    return [Problem(path="data.num_epoch", rule=rule_text, value=show(data.num_epoch), fix="set data.num_rollout")]


@rule("data.start_rollout_id", "data.num_rollout")
def first_rollout_is_in_the_run(config: RunConfig) -> list[Problem]:
    first, number = config.data.start_rollout_id, config.data.num_rollout
    if first is None or number is None or first < number:
        return []
    rule_text = f"be below data.num_rollout={number}"
    fix = f"the run ends after rollout {number - 1}; raise data.num_rollout, which counts from rollout 0"
    return [Problem(path="data.start_rollout_id", rule=rule_text, value=show(first), fix=fix)]


MEDIA = ("image", "video", "audio")


@rule("data.multimodal_keys", "data.apply_chat_template")
def media_stand_in_messages(config: RunConfig) -> list[Problem]:
    fields, path = config.data.multimodal_keys, "data.multimodal_keys"
    if fields is None:
        return []
    problems = []
    for kind in sorted(fields.keys() - set(MEDIA)):
        found = nearest(kind, MEDIA)
        fix = f"did you mean {found}?" if found else "leave it out"
        problems.append(Problem(path=path, rule=f"have keys among {', '.join(MEDIA)}", value=kind, fix=fix))
    if not config.data.apply_chat_template:
        rule, fix = "be true with data.multimodal_keys", "the chat template places them; set it"
        problems.append(Problem(path="data.apply_chat_template", rule=rule, value="false", fix=fix))
    return problems
