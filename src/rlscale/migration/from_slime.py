"""Arguments of slime as keys, and what its commands mean beyond single arguments."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from rlscale.architectures.family import find_family
from rlscale.config.keys import keys
from rlscale.config.slime_modules import MODULES
from rlscale.migration.argument_tables import TableRow, read_table
from rlscale.migration.findings import Finding, Kind
from rlscale.migration.foreign_arguments import Argument, Project
from rlscale.migration.model_option import choose_model
from rlscale.migration.settings import Setting
from rlscale.migration.shell_values import value_of
from rlscale.migration.slime_distillation import DISTILLATION, has_zero_reward
from rlscale.migration.translation_draft import Conversion, TranslationDraft, place_as, translate, write_defaults

SFT = "slime.rollout.sft_rollout.generate_rollout"
BUILT_IN = "slime.rollout.sglang_rollout.generate_rollout"
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
BUFFER_CLIENT = "slime_plugins.rollout_buffer."
OPSM_DELTA = 1e-4

PLUGIN_FAMILIES: Mapping[str, str] = MappingProxyType({"glm5": "glm_moe_dsa", "gptoss": "gpt_oss"})
"""Modules of `slime_plugins.models` that have another name than their family."""

VERSIONS = ("v0.1.0", "v0.2.0", "v0.2.1", "v0.2.2", "v0.2.3", "v0.2.4", "v0.3.0", "v0.3.1", "HEAD")
"""Versions whose arguments are in the table, from the oldest."""


def translate_slime(draft: TranslationDraft) -> None:
    """Places every argument of a command of slime and writes what it implies."""
    translate(draft, read_table(Project.slime), CONVERSIONS)
    _staleness(draft)
    _user_code(draft)
    if "train.true_on_policy_mode" in draft.settings:
        draft.write("rollout.engine", Setting(value="embedded"), "only its kernels can run in the trainer")
    _rollout_files(draft)
    write_defaults(draft)
    choose_model(draft)
    draft.note(Kind.variable, "slime", recognise(draft))


def recognise(draft: TranslationDraft) -> str:
    """The versions of slime that have all arguments of a command."""
    table = read_table(Project.slime)
    oldest, newest = 0, len(VERSIONS) - 1
    since = until = ""
    for argument in draft.reading.arguments:
        row = table.get(argument.name)
        if row is None:
            continue
        if row.since and VERSIONS.index(row.since) > oldest:
            oldest, since = VERSIONS.index(row.since), argument.name
        if row.until and VERSIONS.index(row.until) < newest:
            newest, until = VERSIONS.index(row.until), argument.name
    if oldest > newest:
        return f"no version has both {since} (since {VERSIONS[oldest]}) and {until} (until {VERSIONS[newest]})"
    reasons = [
        f"{name} {word}" for name, word in ((since, "is new in the first"), (until, "ends with the last")) if name
    ]
    span = VERSIONS[oldest] if oldest == newest else f"{VERSIONS[oldest]} to {VERSIONS[newest]}"
    return f"version {span}" + (f": {', '.join(reasons)}" if reasons else "")


# Conversions of single arguments.


def _unknown(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Arguments without a row: those of SGLang and Megatron."""
    name = argument.name.lstrip("-").replace("-", "_")
    if name.startswith("sglang_") and draft.library(argument, "sglang", name.removeprefix("sglang_")):
        return
    if draft.library(argument, "megatron", name):
        return
    if name.startswith("no_") and not argument.values and draft.library(argument, "megatron", name[3:]):
        draft.settings[f"megatron.{name[3:]}"] = Setting(value=False)
        return
    text = "is an argument of no version that the table knows" if argument.name.startswith("--") else "is no argument"
    draft.report(argument, Kind.lost, text)


def _load(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    save, checkpoint = draft.given("--save"), draft.given("--hf-checkpoint")
    if save is not None and _folder(save) == _folder(argument):
        text = "is the folder of --save: a run resumes what it saved there, unless run.name or its config has changed"
        draft.report(argument, Kind.dropped, text)
    elif checkpoint is not None and _folder(checkpoint) == _folder(argument):
        draft.report(argument, Kind.dropped, "is --hf-checkpoint, from which a run starts")
    else:
        draft.rename(argument, row)


def _hf_checkpoint(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """The engines of slime load this folder, and a weight sync quantises as its weights are."""
    draft.rename(argument, row)
    name = posixpath.basename(_folder(argument))
    if name.lower().endswith(("-fp8", "_fp8")):
        draft.write("rollout.weight_precision", Setting(value="fp8"), f"the weights of {name} are in FP8")
    elif name.lower().endswith(("-int4", "_int4")):
        text = "is not what engines get: SGLang repacks INT4 weights when it loads them, so a sync cannot replace them"
        draft.note(Kind.lost, name, text)


def _ref_load(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    checkpoint = draft.given("--hf-checkpoint")
    name = "" if checkpoint is None else posixpath.basename(_folder(checkpoint))
    own = posixpath.basename(_folder(argument))
    # `Qwen3-4B_torch_dist` is a conversion of `Qwen3-4B`, whose FP8 or BF16 copy may be what the engines load.
    stem = re.sub(r"[-_](FP8|BF16|fp8|bf16|INT4|int4|torch[-_]dist)$", "", name)
    if name and (own == name or (own.startswith(stem) and "torch_dist" in own.replace("-", "_"))):
        text = "is a conversion of --hf-checkpoint: weights, and the reference, are read from there"
        draft.report(argument, Kind.dropped, text)
        return
    note = "slime also starts from it; a run starts from model.hf_checkpoint unless checkpoint.load is set"
    draft.rename(argument, TableRow(argument=row.argument, key=row.key, conversion="", note=note))


def _folder(argument: Argument) -> str:
    return argument.value.rstrip("/")


def _rollout_function(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    path = argument.value
    if path == SFT:
        draft.report(argument, Kind.dropped, "algo.loss_type=sft_loss reads labelled data without a function")
        if not draft.has("--apply-chat-template"):
            reason = f"{SFT} renders conversations"
            draft.write("data.apply_chat_template", Setting(value=True), reason)
    elif path == BUILT_IN:
        draft.report(argument, Kind.dropped, "is the built-in function")
    elif path.startswith(BUFFER_CLIENT) and draft.has("--rollout-buffer-url"):
        draft.report(argument, Kind.dropped, "is slime's client of the buffer; buffer.url needs no function")
    elif "fully_async" in path and row.key == "rollout.function_path":
        note = "generation that never waits: rollout.max_staleness with updates in flight"
        draft.set(argument, "rollout.max_staleness", Setting(value=1), note=note)
        draft.write("rollout.update_mode", Setting(value="in_flight"), "weights change while requests run")
    else:
        draft.rename(argument, row)


def _dynamic_filter(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value == NONZERO_STD:
        draft.set(argument, "algo.dynamic_sampling", Setting(value=True))
    else:
        draft.rename(argument, row)


def _rm_type(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if has_zero_reward(draft):
        draft.report(argument, Kind.dropped, "has no effect: --custom-rm-path takes precedence")
    elif argument.value in keys()["reward.type"].choices:
        draft.rename(argument, row)
    else:
        choices = "|".join(keys()["reward.type"].choices)
        draft.report(argument, Kind.lost, f"reward.type must be one of {choices}; write a reward.custom_path")


def _train_only(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if _is_sft(draft):
        draft.report(argument, Kind.dropped, "supervised training starts no engines")
    else:
        draft.set(argument, row.key, Setting(value=True))


def _advantages(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if _is_sft(draft):
        draft.report(argument, Kind.dropped, "supervised training computes no advantages")
    else:
        draft.set(argument, row.key, Setting(value=False))


def _is_sft(draft: TranslationDraft) -> bool:
    loss = draft.given("--loss-type")
    return loss is not None and loss.value == "sft_loss"


def _eval_sets(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if len(argument.values) % 2 and len(argument.values) > 1:
        text = "names and files must come in pairs"
        draft.findings.append(
            Finding(kind=Kind.wrong, subject=argument.text, text=text, source=argument.source, key=row.key)
        )
    draft.rename(argument, row)


def _opsm(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if not draft.has("--use-opsm"):
        draft.report(argument, Kind.dropped, "has no effect without --use-opsm")
    elif argument.name == "--opsm-delta":
        draft.rename(argument, row)
    elif draft.has("--opsm-delta"):
        draft.report(argument, Kind.dropped, row.note)
    else:
        draft.set(argument, "algo.opsm_delta", Setting(value=OPSM_DELTA))


def _weights(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    mode, transport = draft.given("--update-weight-mode"), draft.given("--update-weight-transport")
    is_delta = mode is not None and mode.value == "delta"
    if argument is mode and not is_delta:
        draft.report(argument, Kind.dropped, "whole weights are sent by every channel except delta")
    elif argument is mode:
        draft.set(argument, "train.weight_channel", Setting(value="delta"))
    elif is_delta:
        draft.report(argument, Kind.dropped, "train.weight_channel=delta writes files")
    else:
        channel = {"nccl": "process_group", "disk": "disk"}.get("" if transport is None else transport.value)
        if channel is None:
            draft.report(argument, Kind.lost, "train.weight_channel is process_group, shared_memory, disk or delta")
        else:
            draft.set(argument, "train.weight_channel", Setting(value=channel))


def _warmup_iters(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if draft.has("--lr-warmup-fraction"):
        draft.report(argument, Kind.dropped, "has no effect: --lr-warmup-fraction takes precedence")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _zero(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_zero = re.fullmatch(r"0*\.?0*", argument.value) is not None
    draft.report(argument, Kind.dropped if is_zero else Kind.lost, row.note)


def _config(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.report(argument, Kind.architecture, row.note)


def _spec(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """The function that returns the layers of a model: slime's own ones belong to a family, others are the user's."""
    package, *parts = argument.value.split(".")
    if package == "slime_plugins":
        module = parts[1] if len(parts) > 1 else ""
        family = find_family(PLUGIN_FAMILIES.get(module, module))
        text = f"Megatron-core does not train {family.name} here (docs/how-to/megatron.md says why); choose train=fsdp"
        draft.report(argument, *((Kind.architecture, row.note) if family.megatron else (Kind.lost, text)))
        return
    # Megatron-LM takes a module and a name; one word is a function in a module of Megatron-LM.
    name = ":".join(each for each in (value_of(text) for text in argument.values) if each)
    draft.set(argument, row.key, Setting(value=name))


def _role_file(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if posixpath.basename(argument.value).rpartition(".")[0] in draft.reading.configs:
        draft.report(argument, Kind.dropped, row.note)
    else:
        text = f"{argument.value or 'the file'} with a list 'megatron' is not next to the script; copy it there, and "
        text += "migrate again"
        draft.report(argument, Kind.lost, text)


def _later(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Arguments of the architecture are placed together, when all are known."""


CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        "unknown": _unknown,
        "load": _load,
        "hf_checkpoint": _hf_checkpoint,
        "ref_load": _ref_load,
        "rollout_function": _rollout_function,
        "dynamic_filter": _dynamic_filter,
        "rm_type": _rm_type,
        "train_only": _train_only,
        "advantages": _advantages,
        "eval_sets": _eval_sets,
        "opsm": _opsm,
        **DISTILLATION,
        "weights": _weights,
        "spec": _spec,
        "role_file": _role_file,
        "warmupiters": _warmup_iters,
        "zero": _zero,
        "config": _config,
        "model": _later,
        "drop": place_as(Kind.dropped),
        "lost": place_as(Kind.lost),
        "secret": place_as(Kind.secret),
    }
)
"""Conversion of the table -> the function that places an argument."""


# What a command means as a whole.


def _staleness(draft: TranslationDraft) -> None:
    if draft.reading.launcher != "train_async.py":
        return
    if "rollout.max_staleness" not in draft.settings:
        reason = "train_async.py generates the next rollout while it trains"
        draft.write("rollout.max_staleness", Setting(value=1), reason)
        draft.write("rollout.update_mode", Setting(value="boundary"), "train_async.py updates between two rollouts")
    own = ("algo.use_tis", "algo.use_rollout_logprobs", "train.keep_old_actor")
    if not any(path in draft.settings for path in own) and not _is_sft(draft):
        reason = "slime clips around the logprobs of its trainer without a further weight"
        draft.write("algo.decoupled_loss", Setting(value=False), reason)
    if draft.has("--colocate"):
        subject = "train_async.py with --colocate"
        draft.note(Kind.wrong, subject, "slime refuses it: generation and training need separate GPUs")


def _rollout_files(draft: TranslationDraft) -> None:
    """One file of every rollout, where slime writes each rollout over the one before."""
    path = "debug.save_rollout_data"
    setting = draft.settings.get(path)
    if setting is None or not isinstance(setting.value, str) or "{rollout_id}" in setting.value or setting.text:
        return
    stem, suffix = posixpath.splitext(setting.value)
    reason = "slime writes every rollout to the same file; rlscale keeps one file for each"
    draft.write(path, Setting(value=f"{stem}_{{rollout_id}}{suffix}"), reason)


def _user_code(draft: TranslationDraft) -> None:
    """Lets functions of the user import slime's names."""
    hooks = [finding for finding in draft.places.values() if finding.kind is Kind.hook]
    for finding in hooks:
        path = str(draft.settings[finding.key].value)
        module = path.replace(":", ".").rpartition(".")[0]
        if module.split(".")[0] == "slime" and module not in MODULES:
            text = "is a function of slime itself that rlscale does not provide; copy it into your own module"
            draft.note(Kind.lost, path, text)
    if hooks:
        draft.write("run.slime_modules", Setting(value=True), "your functions can import slime's names")
