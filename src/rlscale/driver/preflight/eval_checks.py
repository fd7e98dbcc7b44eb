"""Checks of evaluation sets: their files, chat templates, rewards and functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlscale.config import RunConfig
from rlscale.config.resolve.eval_sets import EvalSetConfig, eval_sets
from rlscale.config.rules import uses_engines
from rlscale.config.rules.rewards import WITHOUT_LABELS
from rlscale.driver.preflight.data_files import check_file, read_template
from rlscale.driver.preflight.model_sources import starting_folder
from rlscale.errors import ConfigError, Problem

KEY = "eval.config"
_FIELDS = {
    "reward.type": "rm_type",
    "reward.custom_path": "custom_rm_path",
    "sampling.custom_generate_function_path": "custom_generate_function_path",
}
"""Fields of a set by the key that has the same meaning for the whole run."""


def check_eval_sets(config: RunConfig) -> list[Problem]:
    """Problems of the files of an evaluation, and of the settings that depend on the run."""
    problems = []
    for each in _sets(config):
        rows = each.data(config.data)
        template = read_template(config, applies=rows.apply_chat_template)
        key = "eval.prompt_data" if config.eval.config is None else KEY
        problems += check_file(key, rows, template=template)
        problems += [*_template_problems(each, config), *_label_problems(each, config)]
    return problems


def check_eval_functions(config: RunConfig) -> list[Problem]:
    """Problems of rewards and generate functions that the file of `eval.config` names; imports those of users."""
    problems: list[Problem] = []
    for each in _sets(config):
        for problem in _function_problems(each, config):
            field = _FIELDS.get(problem.path)
            if field is None:
                problems.append(problem)
                continue
            problems.append(replace(problem, path=f"{field} of the set {each.name} of {KEY}"))
    return problems


def _sets(config: RunConfig) -> list[EvalSetConfig]:
    if config.eval.interval is None or not uses_engines(config):
        return []
    try:
        return eval_sets(config.eval)
    except ValueError:
        return []  # a rule of the config reports the file, or a name without a file


def _template_problems(each: EvalSetConfig, config: RunConfig) -> Iterator[Problem]:
    # The same problem of the whole run is reported by another check.
    if not each.own.apply_chat_template or config.data.apply_chat_template or config.model.build is not None:
        return
    folder = starting_folder(config)
    if folder is not None and read_template(config, applies=True) is None:
        path, rule = f"apply_chat_template of the set {each.name} of {KEY}", f"be false with {str(folder)!r}"
        fix = "its tokenizer has no chat template; give a model with chat_template.jinja, or prompts that are strings"
        yield Problem(path=path, rule=rule, value="true", fix=fix)


def _label_problems(each: EvalSetConfig, config: RunConfig) -> Iterator[Problem]:
    name = each.own.rm_type
    if name is None or each.own.custom_rm_path is not None or name in WITHOUT_LABELS:
        return
    if each.data(config.data).label_key is None:
        rule, fix = f"have a label_key for the set {each.name}, whose rm_type is {name}", "add label_key, or set"
        yield Problem(path=KEY, rule=rule, value="null", fix=f"{fix} eval.label_key to the field with the answer")


def _function_problems(each: EvalSetConfig, config: RunConfig) -> list[Problem]:
    own, problems = each.own, list[Problem]()
    if own.rm_type is None and own.custom_rm_path is None and own.custom_generate_function_path is None:
        return problems
    # Imported here: they import numpy, and most configs name no function for a set.
    from rlscale.plugins.args_view import Args
    from rlscale.plugins.load_plugin import load_plugin
    from rlscale.rewards import prepare_reward

    args = Args(config)
    if own.rm_type is not None or own.custom_rm_path is not None:
        reward = each.reward(config.reward) or config.reward
        types = [] if own.rm_type is None or own.custom_rm_path is not None else [own.rm_type]
        try:
            prepare_reward(reward, custom=config.custom, args=args, row_types=types)
        except ConfigError as error:
            problems += error.problems
    if own.custom_generate_function_path is not None:
        key = "sampling.custom_generate_function_path"
        try:
            load_plugin(key, own.custom_generate_function_path, args=args, custom=config.custom)
        except ConfigError as error:
            problems += error.problems
    return problems
