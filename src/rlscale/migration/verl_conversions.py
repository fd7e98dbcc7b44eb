"""Conversions of verl's keys of data, batches, losses and the optimiser."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import PurePosixPath
from types import MappingProxyType

from rlscale.config.keys import keys
from rlscale.migration.argument_tables import FOLDER, TableRow
from rlscale.migration.findings import Kind
from rlscale.migration.foreign_arguments import Argument
from rlscale.migration.settings import Setting, hydra_list
from rlscale.migration.shell_values import Text, template_of, value_of
from rlscale.migration.translation_draft import Conversion, TranslationDraft

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
DEFAULT_BATCH, DEFAULT_MINI_BATCH, DEFAULT_TOKENS = 1024, 256, 16384
DEFAULT_CLIP = 0.2

ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "grpo",
        "grpo_vectorized": "grpo",
        "gae": "ppo",
        "reinforce_plus_plus": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "gpg": "gpg",
    }
)
LOSSES: Mapping[str, str | None] = MappingProxyType(
    {"vanilla": None, "gspo": "gspo", "gpg": "reinforce", "sapo": "sapo", "cispo": "cispo"}
)
KL_TYPES: Mapping[str, str] = MappingProxyType(
    {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
)
RENAMED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "estimator": ESTIMATORS,
        "kltype": KL_TYPES,
        "schedule": {"constant": "constant", "cosine": "cosine", "linear": "linear"},
        "strategy": {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"},
        "optimizer": {"AdamW": "adam", "adam": "adam", "Adam": "adam"},
        "device": {"cuda": "cuda"},
    }
)
"""Conversion -> value of verl -> value of rlscale."""


def is_supervised(draft: TranslationDraft) -> bool:
    """Whether the run is one of verl's supervised trainers."""
    return "sft" in draft.reading.launcher


@cache
def default_values() -> Mapping[str, frozenset[str]]:
    """The values that verl's own configurations give each key."""
    found: dict[str, set[str]] = {}
    with (FOLDER / "verl_defaults.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["argument"], set()).add(row["value"].lower())
    return MappingProxyType({name: frozenset(values) for name, values in found.items()})


# Conversions of single keys.


def _unknown(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if " ".join(argument.value.split()).lower() in default_values().get(argument.plain_name, ()):
        draft.report(argument, Kind.dropped, "has verl's default value")
    elif "=" not in argument.name and not argument.values and not argument.name.startswith("-"):
        draft.report(argument, Kind.wrong, "is no override of Hydra; verl would refuse it")
    else:
        draft.report(argument, Kind.lost, "rlscale has no such key")


def _lost(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Keys without a counterpart; they are no loss where they ask for nothing."""
    parents = argument.plain_name.split(".")[:-1]
    switches = [draft.given(".".join([*parents[:length], "enable"])) for length in range(1, len(parents) + 1)]
    is_off = any(switch is not None and switch.value.lower() == "false" for switch in switches)
    if is_off or argument.value.lower() in ("null", "none", "false", "[]", "{}", "", "0"):
        draft.report(argument, Kind.dropped, "is off")
    elif argument.value.lower() in default_values().get(argument.plain_name, ()):
        draft.report(argument, Kind.dropped, "has verl's default value")
    else:
        draft.report(argument, Kind.lost, row.note)


def _renamed(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    values = RENAMED[row.conversion]
    if argument.value in ("null", "None"):
        draft.report(argument, Kind.dropped, "is not set")
    elif argument.value not in values:
        text = f"{row.key} has no {argument.value}; it is one of {'|'.join(keys()[row.key].choices)}"
        draft.report(argument, Kind.lost, text)
    else:
        draft.set(argument, row.key, Setting(value=values[argument.value]))


def _files(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    files = hydra_list(argument.values)
    if len(files) > 1:
        draft.set(argument, "data.prompt_files", as_paths(files))
    else:
        draft.set(argument, row.key, as_paths(files, single=True))


def _sets(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Evaluation sets: verl has files only; the name of a set is that of its folder or file."""
    entries: list[Text] = []
    for file in hydra_list(argument.values):
        path = PurePosixPath(value_of(file) or template_of(file))
        generic = path.stem in ("test", "val", "validation", "eval", "train")
        name = re.sub(r"[^\w.-]", "_", path.parent.name if generic and path.parent.name else path.stem) or "eval"
        entries += [tuple(replace(piece, value=name, template=name) for piece in file[:1]), file]
    if entries:
        draft.set(argument, row.key, as_paths(entries))
    else:
        draft.report(argument, Kind.dropped, "is empty")


def as_paths(texts: list[Text], *, single: bool = False) -> Setting:
    settings = [Setting.from_text(text) for text in texts]
    if single:
        return settings[0] if settings else Setting(value=None)
    return Setting.collect(settings)


def _mini(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if is_supervised(draft):
        draft.report(argument, Kind.dropped, "supervised training has one batch size")
        return
    number, per_prompt = number_of(argument), samples_per_prompt(draft)
    if number is None or per_prompt is None:
        draft.report(argument, Kind.unresolved, "its value is the output of a program; give the variable with --set")
        return
    draft.set(argument, row.key, Setting(value=int(number * per_prompt)), note=row.note)


def number_of(argument: Argument | None) -> float | None:
    try:
        number = None if argument is None else float(argument.value)
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def samples_per_prompt(draft: TranslationDraft) -> float | None:
    argument = draft.given(f"{ROLLOUT}n")
    return 1.0 if argument is None else number_of(argument)


def _agg(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value in ("token-mean", "seq-mean-token-mean"):
        setting = Setting(value=argument.value == "token-mean")
        draft.set(argument, "algo.calculate_per_token_loss", setting)
    elif argument.value == "seq-mean-token-sum-norm":
        draft.set(argument, "algo.divide_by_max_response_len", Setting(value=True))
    else:
        text = "a loss is the mean over tokens, or over the means of samples; or algo.custom_reducer_function_path"
        draft.report(argument, Kind.lost, text)


def _klcoef(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given(f"{ACTOR}use_kl_loss")
    if used is None or used.value.lower() != "true":
        draft.report(argument, Kind.dropped, f"has no effect without {ACTOR}use_kl_loss")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _klreward(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given("algorithm.use_kl_in_reward")
    if argument is used:
        draft.report(argument, Kind.dropped, row.note)
        if argument.value.lower() == "true" and not draft.has("algorithm.kl_ctrl.kl_coef"):
            draft.write("algo.kl_coef", Setting(value=0.001), "verl's default with use_kl_in_reward")
        loss = draft.given(f"{ACTOR}use_kl_loss")
        has_loss = loss is not None and loss.value.lower() == "true"
        if argument.value.lower() == "true" and not has_loss and not draft.has("algorithm.kl_penalty"):
            draft.write("algo.kl_loss_type", Setting(value="k1"), "verl's default of algorithm.kl_penalty")
    elif used is None or used.value.lower() != "true":
        draft.report(argument, Kind.dropped, "has no effect without algorithm.use_kl_in_reward")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _klpenalty(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given("algorithm.use_kl_in_reward")
    if used is None or used.value.lower() != "true":
        draft.report(argument, Kind.dropped, "has no effect without algorithm.use_kl_in_reward")
    else:
        _renamed(draft, argument, replace(row, conversion="kltype"))


def _klctrl(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    fixed = argument.value == "fixed"
    draft.report(argument, Kind.dropped if fixed else Kind.lost, "the coefficient of the KL penalty is fixed")


def _loss(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value not in LOSSES:
        text = f"algo.policy_loss is one of {'|'.join(keys()[row.key].choices)}, or algo.custom_loss_function_path"
        draft.report(argument, Kind.lost, text)
    elif LOSSES[argument.value] is None:
        draft.report(argument, Kind.dropped, "is the clipped loss of the estimator")
    else:
        draft.set(argument, row.key, Setting(value=LOSSES[argument.value]))


def _betas(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    # `[0.9,0.999]`: first and second moment.
    betas = [value_of(each) for each in hydra_list(argument.values)]
    if len(betas) != 2:
        draft.report(argument, Kind.wrong, "must be two numbers")
        return
    try:
        first, second = map(float, betas)
    except ValueError:
        draft.report(argument, Kind.wrong, "must be two numbers")
        return
    draft.settings["optim.adam_beta1"] = Setting(value=first)
    draft.set(argument, "optim.adam_beta2", Setting(value=second))


def _steps(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    number = number_of(argument)
    if number is None or number <= 0:
        draft.report(argument, Kind.dropped, "is not set")
    else:
        draft.rename(argument, replace(row, conversion="", note=""))


def _updates(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Steps of verl's schedule, which advances once per rollout, after all of its optimiser steps."""
    number, steps = number_of(argument), _steps_per_rollout(draft)
    if number is None or number <= 0:
        draft.report(argument, Kind.dropped, "is not set")
    else:
        draft.set(argument, row.key, Setting(value=round(number * steps)), note=row.note if steps != 1 else "")


def _steps_per_rollout(draft: TranslationDraft) -> int:
    """Optimiser steps of a rollout; 1 in supervised training."""
    if is_supervised(draft):
        return 1
    batch = number_of(draft.given("data.train_batch_size")) or DEFAULT_BATCH
    size = number_of(draft.given(f"{ACTOR}ppo_mini_batch_size")) or DEFAULT_MINI_BATCH
    return max(1, round(batch / size)) * max(1, round(number_of(draft.given(f"{ACTOR}ppo_epochs")) or 1))


def _clip(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """The clip range: clip_ratio counts only in place of a bound that is null, and both are 0.2 by default."""
    bounds = {"algo.eps_clip": f"{ACTOR}clip_ratio_low", "algo.eps_clip_high": f"{ACTOR}clip_ratio_high"}
    nulls = [key for key, name in bounds.items() if (used := draft.given(name)) is not None and _is_null(used)]
    if argument.plain_name in bounds.values():
        if _is_null(argument):
            draft.report(argument, Kind.dropped, "clip_ratio stands for it")
            return
        draft.rename(argument, replace(row, conversion=""))
        if row.key == "algo.eps_clip" and draft.given(bounds["algo.eps_clip_high"]) is None:
            draft.write("algo.eps_clip_high", Setting(value=DEFAULT_CLIP), "verl's default of clip_ratio_high")
        return
    for key in nulls:
        draft.rename(argument, replace(row, key=key, conversion="", note=""))
    if not nulls:
        is_default = number_of(argument) == DEFAULT_CLIP
        text = "clip_ratio_low and clip_ratio_high, 0.2 by default, take precedence over it in verl"
        draft.report(argument, Kind.dropped if is_default else Kind.wrong, text)


def _is_null(argument: Argument) -> bool:
    return argument.value.lower() in ("null", "none")


def _kltype(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given(f"{ACTOR}use_kl_loss")
    if used is None or used.value.lower() != "true":
        draft.report(argument, Kind.dropped, f"has no effect without {ACTOR}use_kl_loss")
    else:
        _renamed(draft, argument, row)


def _minlr(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    lr = draft.given(f"{ACTOR}optim.lr") or draft.given("optim.lr")
    rate, ratio = 1e-6 if lr is None else number_of(lr), number_of(argument)
    if rate is None or ratio is None:
        draft.report(argument, Kind.dropped, "is not set")
    else:
        draft.set(argument, row.key, Setting(value=rate * ratio), note="the rate itself, not its share of optim.lr")


COMMON_CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        **dict.fromkeys(RENAMED, _renamed),
        "kltype": _kltype,
        "clip": _clip,
        "updates": _updates,
        "unknown": _unknown,
        "files": _files,
        "sets": _sets,
        "mini": _mini,
        "agg": _agg,
        "klcoef": _klcoef,
        "klreward": _klreward,
        "klpenalty": _klpenalty,
        "klctrl": _klctrl,
        "loss": _loss,
        "betas": _betas,
        "steps": _steps,
        "minlr": _minlr,
        "mtp": _lost,
        "lost": _lost,
    }
)
"""Conversion of the table -> the function that places a key of data, batches, losses or the optimiser."""
