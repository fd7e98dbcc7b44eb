"""Checks of prompt files: they exist, can be read, and their first rows fit the config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlscale.config import DataConfig, LossType, RunConfig, prompt_paths
from rlscale.config.installed import is_installed
from rlscale.config.rules import learns_conversations, only_evaluates
from rlscale.config.rules.model import architecture_field
from rlscale.data.data_paths import PARQUET, SUFFIXES, files_to_name, find_data_files, is_missing, resolve_data_path
from rlscale.data.downloads import advice_for, command_for
from rlscale.data.first_rows import CheckMetadata, check_first_rows
from rlscale.data.length_filter import Limit, prompt_limit
from rlscale.data.rows import BadRowError
from rlscale.driver.preflight.model_sources import starting_folder
from rlscale.driver.preflight.row_rewards import row_reward_check
from rlscale.errors import DataError, Problem
from rlscale.models.chat_template import ChatTemplate, read_chat_template
from rlscale.models.tiny_tokenizer import tiny_chat_template

FILE_EXISTS = "name a file that exists"
"""The rule that a data file breaks which is not on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChecks:
    """Further checks of the rows of a file, see `check_first_rows`."""

    learns_conversations: bool = False
    metadata: CheckMetadata | None = None
    limit: Limit | None = None


def check_prompts(config: RunConfig) -> list[Problem]:
    """Problems of the training prompts, of their first row and of the chat template."""
    data = config.data
    problems = check_template(config)
    if not data.rollout_global_dataset or only_evaluates(config):
        return problems
    # A source of the user reads the file in its way.
    is_read = data.data_source_path is None
    key = "data.prompt_data" if data.prompt_files is None else "data.prompt_files"
    template = read_template(config, applies=config.data.apply_chat_template)
    checks = RowChecks(
        learns_conversations=learns_conversations(config),
        metadata=row_reward_check(config),
        limit=_prompt_limit(config),
    )
    return problems + [
        problem
        for path in prompt_paths(data)
        for problem in check_file(
            key,
            _row_keys(config, path),
            template=template,
            is_read=is_read,
            checks=checks,
        )
    ]


def _prompt_limit(config: RunConfig) -> Limit | None:
    """The longest prompt of training, without the labels that supervised training adds."""
    is_supervised = config.algo.loss_type == LossType.sft_loss
    positions = None if is_supervised else architecture_field(config.model, "max_position_embeddings")
    return prompt_limit(config.rollout, positions)


def check_template(config: RunConfig) -> list[Problem]:
    """Problem of `data.apply_chat_template` with a tokenizer that has no template."""
    if not config.data.apply_chat_template or config.model.build is not None:
        return []
    folder = starting_folder(config)
    if folder is None or read_template(config, applies=config.data.apply_chat_template) is not None:
        return []
    rule = f"be false with {str(folder)!r}, whose tokenizer has no chat template"
    fix = "give a model with chat_template.jinja, or prompts that are strings"
    return [Problem(path="data.apply_chat_template", rule=rule, value="true", fix=fix)]


def check_replay(config: RunConfig) -> list[Problem]:
    """Problems of the files of all rollouts, as far as their number is known."""
    template, key = config.debug.load_rollout_data, "debug.load_rollout_data"
    if template is None:
        return []
    # With data.num_epoch the number of rollouts is unknown here; then the first file is checked.
    rollouts = range(config.data.start_rollout_id or 0, config.data.num_rollout or 1)
    missing = [path for i in rollouts if not Path(path := template.replace("{rollout_id}", str(i))).is_file()]
    if not missing:
        return []
    fix = "lower data.num_rollout to the number of saved rollouts, or check the path"
    return [Problem(path=key, rule="name files that exist for every rollout", value=missing[0], fix=fix)]


def read_template(config: RunConfig, *, applies: bool) -> ChatTemplate | None:
    """The chat template of the starting model; None: it has none, or prompts do not use it."""
    if not applies:
        return None
    if config.model.build is not None:
        return tiny_chat_template(config.model.build)
    folder = starting_folder(config)
    return None if folder is None else read_chat_template(folder)


def _row_keys(config: RunConfig, path: str) -> DataConfig:
    """The group `data` with one file. Field by field: a check records the keys that it reads."""
    data = config.data
    return DataConfig(
        prompt_data=path,
        input_key=data.input_key,
        label_key=data.label_key,
        tool_key=data.tool_key,
        metadata_key=data.metadata_key,
        multimodal_keys=data.multimodal_keys,
        on_bad_row=data.on_bad_row,
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        loss_mask_type=data.loss_mask_type,
    )


def wrong_suffix(key: str, path: str) -> Problem:
    """The problem of a data file in another format."""
    return Problem(path=key, rule=f"end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}", value=path, fix="convert it")


def check_file(
    key: str,
    rows: DataConfig,
    *,
    template: ChatTemplate | None,
    is_read: bool = True,
    checks: RowChecks | None = None,
) -> list[Problem]:
    """Problems of a prompt file and of its first rows."""
    path = rows.prompt_data
    assert path is not None, "every evaluation set has a file"
    file = resolve_data_path(path)
    if is_missing(path):
        command = command_for(file)
        advice = f"get it by `{command}`" if command else advice_for(path)
        fix = f"{advice}; looked" if advice else "looked"
        return [Problem(path=key, rule=FILE_EXISTS, value=path, fix=f"{fix} for {file.absolute()}")]
    if not is_read:
        return []
    if file.is_dir():
        return [Problem(path=key, rule="name a file", value=f"the folder {path}", fix=files_to_name(file))]
    try:
        if any(each.suffix == PARQUET for each in find_data_files(path)) and not is_installed("pyarrow"):
            return []  # reported by the check of packages
        checks = checks or RowChecks()
        check_first_rows(
            rows,
            learns_conversations=checks.learns_conversations,
            template=template,
            check_metadata=checks.metadata,
            limit=checks.limit,
        )
    except BadRowError as error:
        cause = " ".join(str(error).split())
        return [Problem(path=key, rule="name a file whose rows can be used", value=path, fix=cause)]
    except (DataError, OSError) as error:
        cause = " ".join(str(error).split())
        return [Problem(path=key, rule="name files that can be read", value=path, fix=cause)]
    return []
