"""Arguments of TRL's GRPOConfig and GRPOTrainer as keys, and what its runs mean beyond single arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType

from rlscale.config.keys import keys
from rlscale.migration.argument_tables import TableRow, read_table
from rlscale.migration.findings import Kind
from rlscale.migration.foreign_arguments import Argument, Project
from rlscale.migration.model_option import choose_model
from rlscale.migration.settings import Setting, hydra_list
from rlscale.migration.shell_values import template_of, value_of
from rlscale.migration.translation_draft import Conversion, TranslationDraft, place_as, translate, write_defaults
from rlscale.migration.trl_sizes import (
    PROCESSES,
    finite_number,
    given_number,
    num_gpus,
    num_processes,
    num_rollouts,
    rollout_samples,
    step_samples,
)

SCHEDULES: Mapping[str, str] = MappingProxyType(
    {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
)

SAVE_STEPS = 500
"""TRL's default for the optimiser steps between two checkpoints."""


def translate_trl(draft: TranslationDraft) -> None:
    """Places every argument of a run of TRL and writes what it implies."""
    draft.write("train.backend", Setting(value="fsdp"), "TRL trains models of transformers")
    translate(draft, read_table(Project.trl), CONVERSIONS)
    _batches(draft)
    write_defaults(draft)
    strategy = draft.given("save_strategy")
    if not draft.has("save_steps") and (strategy is None or strategy.value == "steps"):
        interval = num_rollouts(draft, SAVE_STEPS)
        draft.write("checkpoint.save_interval", Setting(value=interval), f"TRL's default, save_steps={SAVE_STEPS}")
    _corrections(draft)
    if not any(path in draft.settings for path in ("reward.type", "reward.custom_path", "reward.functions")):
        draft.note(Kind.lost, "the reward functions", "are code: name them in reward.custom_path or reward.functions")
    choose_model(draft)


def _batches(draft: TranslationDraft) -> None:
    """Sizes of rollouts and steps, which TRL computes from the micro-batch and the number of processes."""
    group = max(1, int(given_number(draft, "num_generations", 8)))
    samples = rollout_samples(draft)
    # A generation batch counts samples; the group size makes prompts of them.
    prompts = max(1, samples // group)
    reason = f"{samples} samples of a generation batch / {group} of a prompt, with {num_processes(draft)} processes"
    draft.write("batch.rollout_batch_size", Setting(value=prompts), reason)
    if "batch.global_batch_size" not in draft.settings:
        step = min(step_samples(draft), prompts * group)
        draft.write("batch.global_batch_size", Setting(value=step), "samples of an optimiser step")
    colocate = draft.settings.get("cluster.colocate")
    if "rollout.max_staleness" in draft.settings or (colocate is not None and colocate.value is False):
        draft.settings["cluster.colocate"] = Setting(value=False)
        draft.write("cluster.rollout_num_gpus", Setting(value=1), "the GPUs of the vLLM server")
    nodes, gpus = num_gpus(draft)
    reason = f"one process for each GPU; --set {PROCESSES}=<number>"
    draft.write("cluster.actor_num_gpus_per_node", Setting(value=gpus), reason)
    if nodes > 1:
        draft.write("cluster.actor_num_nodes", Setting(value=nodes), "the nodes that the command starts")
    if samples % group:
        draft.note(Kind.wrong, f"a generation batch of {samples}", f"is no multiple of num_generations={group}")


def _corrections(draft: TranslationDraft) -> None:
    """Importance weights between trainer and vLLM, which TRL has by default."""
    uses_vllm = draft.given("use_vllm")
    given = draft.given("vllm_importance_sampling_correction")
    if uses_vllm is None or not uses_vllm.is_on or (given and not given.is_on):
        return
    mode = draft.given("vllm_importance_sampling_mode")
    name = "sequence_mask" if mode is None else mode.value
    if "algo.use_tis" not in draft.settings:
        draft.write("algo.use_tis", Setting(value=True), "TRL corrects for the probabilities of vLLM")
    if "algo.tis_clip" not in draft.settings:
        draft.write("algo.tis_clip", Setting(value=3.0), "TRL's default")
    low, is_mask = draft.settings.get("algo.mis.low"), name.endswith("mask")
    own_mode = "mask" if is_mask else "truncate" if low is None else "clip"
    draft.settings["algo.tis_type"] = Setting(value="mis")
    draft.settings["algo.mis.level"] = Setting(value="sequence" if name.startswith("sequence") else "token")
    draft.settings["algo.mis.mode"] = Setting(value=own_mode)
    if is_mask and low is None:
        draft.write("algo.mis.low", Setting(value=0.0), "TRL masks large weights only")


def _unknown(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.report(argument, Kind.lost, "rlscale has no such argument")


def _sizes(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if row.key:
        step = min(step_samples(draft), max(1, rollout_samples(draft)))
        draft.set(argument, row.key, Setting(value=step), note=row.note)
    else:
        draft.report(argument, Kind.dropped, f"is part of {row.note}")


def _max_steps(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    steps = given_number(draft, argument.plain_name, -1)
    if steps <= 0:
        draft.report(argument, Kind.dropped, "is not set")
    else:
        draft.set(argument, row.key, Setting(value=num_rollouts(draft, steps)), note=row.note)


def _interval(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    steps = given_number(draft, argument.plain_name, 0)
    # transformers saves by steps and evaluates never, unless a strategy says otherwise.
    switch = argument.plain_name.replace("_steps", "_strategy")
    strategy = draft.given(switch)
    chosen = strategy.value if strategy is not None else ("no" if switch == "eval_strategy" else "steps")
    if switch in ("eval_strategy", "save_strategy") and chosen != "steps":
        draft.report(argument, Kind.dropped, f"has no effect with {switch}={chosen}")
    elif steps < 1:
        draft.report(argument, Kind.lost, f"{row.key} is a number of rollouts")
    else:
        draft.set(argument, row.key, Setting(value=num_rollouts(draft, steps)), note=row.note)


def _epochs(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    epochs = given_number(draft, argument.plain_name, 3)
    if given_number(draft, "max_steps", -1) > 0:
        draft.report(argument, Kind.dropped, "has no effect with max_steps")
    elif epochs.is_integer() and epochs > 0:
        draft.set(argument, row.key, Setting(value=int(epochs)))
    else:
        draft.report(argument, Kind.lost, "data.num_epoch is an integer; data.num_rollout ends a run within an epoch")


def _schedule(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value in SCHEDULES:
        draft.set(argument, row.key, Setting(value=SCHEDULES[argument.value]))
    elif argument.value == "cosine_with_min_lr":
        draft.set(argument, row.key, Setting(value="cosine"), note="its minimum is optim.min_lr")
    else:
        draft.report(argument, Kind.lost, f"{row.key} is one of {'|'.join(keys()[row.key].choices)}")


def _warmup(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """The warm-up; transformers ignores it with the schedule `constant`, and its share where there are steps."""
    schedule, steps = draft.given("lr_scheduler_type"), given_number(draft, "warmup_steps", 0)
    if schedule is not None and schedule.value == "constant":
        draft.report(argument, Kind.dropped, "has no effect with lr_scheduler_type=constant")
    elif argument.plain_name == "warmup_ratio":
        if steps > 0:
            draft.report(argument, Kind.dropped, "has no effect with warmup_steps")
        else:
            draft.rename(argument, replace(row, conversion=""))
    elif 0 < steps < 1:
        draft.set(argument, "optim.warmup_ratio", Setting(value=steps))
    else:
        draft.set(argument, row.key, Setting(value=int(steps)))


def _lr_kwargs(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    found = re.search(r"min_lr['\"]?\s*[:=]\s*(\d*\.?\d+(?:[eE][-+]?\d+)?)", argument.value)
    if found is None:
        draft.report(argument, Kind.lost, "the schedules have no further arguments")
    else:
        draft.set(argument, "optim.min_lr", Setting(value=float(found[1])))


def _optimizer(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value.startswith("adamw_torch"):
        draft.set(argument, row.key, Setting(value="adam"))
    else:
        draft.set(argument, row.key, Setting(value="adam"), note=f"AdamW with float32 moments, not {argument.value}")


def _beta(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    beta = given_number(draft, argument.plain_name, 0)
    if beta == 0:
        draft.report(argument, Kind.dropped, "no KL loss, which is the default")
        return
    draft.rename(argument, replace(row, conversion=""))
    draft.write("algo.use_kl_loss", Setting(value=True), "beta is above 0")
    draft.write("algo.kl_loss_type", Setting(value="k3"), "TRL's estimator")


def _clip(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """The clip range; with cispo TRL bounds the weight by epsilon_high itself, or by epsilon where that is not set."""
    loss, high = draft.given("loss_type"), draft.given("epsilon_high")
    if loss is None or loss.value != "cispo":
        draft.rename(argument, replace(row, conversion=""))
        return
    bound = draft.given("epsilon") if high is None or high.value.lower() in OFF else high
    number, note = given_number(draft, argument.plain_name, 0), "the weight of cispo is at most 1 + this"
    if argument is not bound:
        draft.report(argument, Kind.dropped, "has no effect with loss_type=cispo")
    elif number > 1:
        draft.set(argument, "algo.eps_clip_high", Setting(value=round(number - 1, 9)), note=note)
    else:
        draft.report(argument, Kind.lost, "the weight of cispo is at most 1 + algo.eps_clip_high, which is above 1")


def _level(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value == "sequence":
        draft.set(argument, row.key, Setting(value="gspo"))
    elif argument.value == "token":
        draft.report(argument, Kind.dropped, "is the default")
    else:
        draft.report(argument, Kind.lost, "the ratio is that of a token or of a sequence")


def _loss(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    per_token = "algo.calculate_per_token_loss"
    match argument.value:
        case "grpo":
            draft.set(argument, per_token, Setting(value=False))
        case "dapo":
            draft.set(argument, per_token, Setting(value=True))
        case "bnpo":
            note = "the mean over the tokens of a step instead of a micro-batch"
            draft.set(argument, per_token, Setting(value=True), note=note)
        case "dr_grpo":
            draft.set(argument, "algo.divide_by_max_response_len", Setting(value=True))
        case "cispo" | "sapo" as loss:
            draft.settings[per_token] = Setting(value=loss == "cispo")
            if loss == "cispo":
                draft.write("algo.eps_clip", Setting(value=1.0), "TRL bounds the weight of cispo from above only")
            draft.set(argument, "algo.policy_loss", Setting(value=argument.value))
        case _:
            draft.report(argument, Kind.lost, f"algo.policy_loss is {'|'.join(keys()['algo.policy_loss'].choices)}")


def _scale(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    match argument.value.lower():
        case "group" | "true":
            draft.report(argument, Kind.dropped, "is the default of algo.grpo_std_normalization")
        case "none" | "false" | "null":
            draft.set(argument, "algo.grpo_std_normalization", Setting(value=False))
        case "batch":
            draft.set(argument, "algo.scale_rewards", Setting(value="batch"))
        case _:
            draft.report(argument, Kind.lost, row.note)


def _ref_sync(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given("sync_ref_model")
    if used is None or not used.is_on:
        draft.report(argument, Kind.dropped, "the reference is not updated")
    elif row.key:
        _interval(draft, argument, row)
    elif draft.has("ref_model_sync_steps"):
        draft.report(argument, Kind.dropped, row.note)
    else:
        note = "TRL's 512 optimiser steps as rollouts; the policy is copied, not mixed in"
        draft.set(argument, "algo.ref_update_interval", Setting(value=num_rollouts(draft, 512)), note=note)


def _top_k(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    number = int(given_number(draft, argument.plain_name, 0))
    draft.set(argument, row.key, Setting(value=number if number > 0 else -1))


OFF = ("null", "none", "false", "[]", "{}", "")
"""Values that ask for nothing."""


def _lost(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """An argument without a counterpart; no loss where it asks for nothing, as in a file with every argument."""
    if argument.values and argument.is_known and argument.value.lower() in OFF:
        draft.report(argument, Kind.dropped, "is off")
    else:
        draft.report(argument, Kind.lost, row.note)


def _only_with(switch: str, *values: str) -> Conversion:
    """A conversion that loses an argument only where another one has a value that needs it."""

    def place(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
        used = draft.given(switch)
        if used is None or used.value.lower() not in values:
            draft.report(argument, Kind.dropped, f"has no effect without {switch}")
        else:
            _lost(draft, argument, row)

    return place


def _config(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if PurePosixPath(argument.value).stem in draft.reading.configs:
        draft.report(argument, Kind.dropped, "the values of the file are among the arguments")
    else:
        text = f"{argument.value or 'the file'} is not next to the script; copy it there, or translate it by itself"
        draft.report(argument, Kind.lost, text)


def _unless(*defaults: str) -> Conversion:
    """A conversion that loses an argument unless it has one of these values."""

    def place(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
        is_default = argument.value.lower() in defaults
        draft.report(argument, Kind.dropped if is_default else Kind.lost, row.note)

    return place


def _min_p(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value.lower() in ("none", "null"):
        draft.report(argument, Kind.dropped, "is off")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _penalty(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    penalty = given_number(draft, argument.plain_name, 1)
    if penalty == 1:
        draft.report(argument, Kind.dropped, "is off")
    else:
        draft.set(argument, "rollout.sampling_params", Setting(value={"repetition_penalty": penalty}))


def _mode(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.set(argument, row.key, Setting(value=argument.value == "colocate"))


def _report_to(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    names = [value_of(each) for each in hydra_list(argument.values)]
    known = [name for name in names if name in ("wandb", "tensorboard")]
    if "all" in names:
        known = ["wandb", "tensorboard"]
    for name in known[1:]:
        draft.settings[f"logging.{name}.enabled"] = Setting(value=True)
    if known:
        draft.set(argument, f"logging.{known[0]}.enabled", Setting(value=True))
    elif set(names) <= {"none", "None", "null", ""}:
        draft.report(argument, Kind.dropped, "metrics are always printed and written as JSONL")
    else:
        draft.report(argument, Kind.lost, "metrics go to JSONL, wandb and TensorBoard")


def _bf16(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.set(argument, row.key, Setting(value="bfloat16" if argument.is_on else "float32"))


def _dtype(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value in ("bfloat16", "float32"):
        draft.set(argument, row.key, Setting(value=argument.value))
    else:
        kind = Kind.dropped if argument.value in ("auto", "null", "None") else Kind.lost
        draft.report(argument, kind, "train.dtype is bfloat16 or float32")


def _attention(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    name = argument.value.rpartition("/")[2].replace("flash-attn2", "flash_attention_2")
    if name in keys()[row.key].choices:
        draft.set(argument, row.key, Setting(value=name))
    else:
        draft.report(argument, Kind.lost, f"{row.key} is one of {'|'.join(keys()[row.key].choices)}")


def _peft(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.is_on and not draft.has("lora_r"):
        draft.set(argument, "train.lora.rank", Setting(value=16))
    else:
        draft.report(argument, Kind.dropped, row.note)


def _lora(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given("use_peft")
    if used is None or not used.is_on:
        draft.report(argument, Kind.dropped, "has no effect without use_peft")
    elif argument.value == "all-linear":
        draft.report(argument, Kind.dropped, "is the default of train.lora.target_modules")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _dataset(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.is_known and argument.value.endswith((".jsonl", ".json", ".parquet")):
        draft.rename(argument, replace(row, conversion="", note=""))
        return
    name = re.sub(r"[^\w.-]+", "_", argument.value) or "train"
    setting = Setting(value=f"data/{name}.jsonl")
    draft.set(argument, row.key, setting, note=f"{row.note}: {argument.value or 'the data set'}")


def _eval_set(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value in ("None", "null"):
        draft.report(argument, Kind.dropped, "there is no evaluation set")
    else:
        draft.set(argument, row.key, Setting(value=["eval", "data/eval.jsonl"]), note=row.note)


def _model(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.is_known and argument.value:
        draft.rename(argument, replace(row, conversion=""))
    elif draft.has("model_name_or_path"):
        draft.report(argument, Kind.dropped, "is model_name_or_path")
    else:
        draft.report(argument, Kind.unresolved, "is an object; set model.hf_checkpoint to its name", key=row.key)


def _rewards(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Reward functions are code: their names are kept, and their form must change."""
    names = [template_of(each).strip("<>") for each in argument.values]
    module = PurePosixPath(argument.source.file).stem if argument.source.file.endswith(".py") else "my_rewards"
    if names == ["accuracy_reward"]:
        draft.set(argument, "reward.type", Setting(value="math"), note="checks the boxed answer against the label")
        draft.write("data.label_key", Setting(value="solution"), "the column that accuracy_reward reads")
        return
    if not names or not all(name.isidentifier() for name in names):
        draft.report(argument, Kind.lost, row.note)
        return
    if len(names) == 1:
        draft.set(argument, "reward.custom_path", Setting(value=f"{module}:{names[0]}"))
    else:
        paths = {name: f"{module}:{name}" for name in names}
        draft.set(argument, "reward.functions", Setting(value=paths))
        given = draft.given("reward_weights")
        numbers = [finite_number(value_of(each)) for each in hydra_list(given.values)] if given is not None else []
        is_whole = len(numbers) == len(names) and None not in numbers
        weights = dict(zip(names, numbers, strict=False)) if is_whole else dict.fromkeys(names, 1.0)
        draft.write("reward.weights", Setting(value=weights), "TRL adds the rewards up")
    draft.note(Kind.hook, ", ".join(names), row.note)
    if argument.source.file.endswith(".py"):
        file = PurePosixPath(argument.source.file).name
        draft.note(Kind.hook, file, f"the script itself: importing {module} runs it; move the functions to a file")


CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        "unknown": _unknown,
        "sizes": _sizes,
        "maxsteps": _max_steps,
        "interval": _interval,
        "epochs": _epochs,
        "schedule": _schedule,
        "warmup": _warmup,
        "lrkwargs": _lr_kwargs,
        "optimizer": _optimizer,
        "beta": _beta,
        "clip": _clip,
        "level": _level,
        "loss": _loss,
        "scale": _scale,
        "refsync": _ref_sync,
        "topk": _top_k,
        "minp": _min_p,
        "penalty": _penalty,
        "vllm": place_as(Kind.dropped),
        "mode": _mode,
        "ismode": _unless("sequence_mask", "token_mask", "sequence_truncate", "token_truncate"),
        "reportto": _report_to,
        "bf16": _bf16,
        "dtype": _dtype,
        "attn": _attention,
        "peft": _peft,
        "lora": _lora,
        "dataset": _dataset,
        "evalset": _eval_set,
        "model": _model,
        "rewards": _rewards,
        "default1": _unless("1", "1.0"),
        "off": _unless("false", "none", "null", "0", "0.0"),
        "aggregation": _unless("sum_then_normalize"),
        "strategy": _unless("no", "steps"),
        "revision": _unless("main", "none", "null"),
        "drop": place_as(Kind.dropped),
        "lost": _lost,
        "config": _config,
        "entropy": _only_with("use_adaptive_entropy", "true", ""),
        "vespo": _only_with("loss_type", "vespo"),
        "hub": _only_with("push_to_hub", "true", ""),
        "secret": place_as(Kind.secret),
    }
)
"""Conversion of the table -> the function that places an argument."""
