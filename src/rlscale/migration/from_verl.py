"""Keys of verl as keys of rlscale, and what its runs mean beyond single keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType

from rlscale.architectures.vision_parts import VISION_PARTS
from rlscale.config.keys import keys
from rlscale.migration.argument_tables import TableRow, read_table
from rlscale.migration.findings import Finding, Kind
from rlscale.migration.foreign_arguments import Argument, Project
from rlscale.migration.model_option import choose_model
from rlscale.migration.named_configs import OWN_CONFIG
from rlscale.migration.settings import Setting, hydra_list
from rlscale.migration.shell_values import value_of
from rlscale.migration.translation_draft import Conversion, TranslationDraft, place_as, translate, write_defaults
from rlscale.migration.verl_conversions import (
    ACTOR,
    COMMON_CONVERSIONS,
    DEFAULT_MINI_BATCH,
    DEFAULT_TOKENS,
    ROLLOUT,
    as_paths,
    default_values,
    is_supervised,
    number_of,
    samples_per_prompt,
)


def translate_verl(draft: TranslationDraft) -> None:
    """Places every key of a run of verl and writes what it implies."""
    translate(draft, read_table(Project.verl), CONVERSIONS)
    _launcher(draft)
    _batches(draft)
    write_defaults(draft, supervised=is_supervised(draft))
    _groups_of_one(draft)
    if draft.settings.get("algo.advantage_estimator", Setting(value="")).value == "ppo":
        for path, value in (("critic.lr", 1e-5), ("critic.value_clip", 0.5)):
            if path not in draft.settings:
                draft.write(path, Setting(value=value), "verl's default of the critic")
    estimator = str(draft.settings.get("algo.advantage_estimator", Setting(value="")).value)
    if estimator == "ppo" or estimator.startswith("reinforce_plus_plus"):
        draft.write("algo.normalize_advantages", Setting(value=True), "verl whitens these advantages")
    _reward(draft)
    choose_model(draft)


def _offload(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_on = argument.value.lower() == "true"
    draft.set(argument, row.key, Setting(value=is_on), note=row.note if is_on else "")


def _alpha(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if number_of(argument) == 0:
        draft.report(argument, Kind.dropped, "there is no adapter")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _fsdp(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_default = argument.value.lower() in ("-1", "false", "true", "0", "null")
    draft.report(argument, Kind.dropped if is_default else Kind.lost, row.note)


def _library(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    group, _, name = row.key.partition(".")
    name = argument.plain_name.rpartition(".")[2] if name == "*" else name
    if f"{group}.{name}" in keys():
        draft.rename(argument, replace(row, key=f"{group}.{name}", conversion=""))
    elif argument.value.lower() in ("null", "none"):
        draft.report(argument, Kind.dropped, "is not set")
    elif not draft.library(argument, group, name):
        draft.report(argument, Kind.lost, f"{group} has no argument {name}")


def _librarynot(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.set(argument, row.key, Setting(value=argument.value.lower() == "false"))


def _bridge(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    ranks = [draft.given(f"actor_rollout_ref.model.{name}") for name in ("lora.rank", "lora_rank")]
    if argument.value.lower() == "true" and any(rank is not None and number_of(rank) for rank in ranks):
        text = "adapters are trained in the other mode, model.megatron_to_hf_mode=raw; the weights are the same"
        draft.report(argument, Kind.dropped, text)
    elif argument.value.lower() == "true":
        draft.set(argument, "model.megatron_to_hf_mode", Setting(value="bridge"))
    else:
        draft.report(argument, Kind.dropped, "weights are converted without mbridge by default")


def _distckpt(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given(f"{ACTOR}megatron.use_dist_checkpointing")
    if argument.value and used is not None and used.value.lower() == "true":
        draft.set(argument, "checkpoint.load", Setting.from_text(argument.values[0]))
    else:
        draft.report(argument, Kind.dropped, "has no effect without use_dist_checkpointing")


def _replay(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    path = {"R2": "algo.use_routing_replay", "R3": "algo.use_rollout_routing_replay"}.get(argument.value)
    if path is None:
        draft.report(argument, Kind.dropped, "is off")
    else:
        draft.set(argument, path, Setting(value=True))


def _checkpointing(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if _backend(draft) == "megatron":
        text = "has no effect with Megatron; megatron.recompute_granularity"
        draft.report(argument, Kind.dropped, text)
    else:
        draft.rename(argument, replace(row, conversion=""))


def _tower(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Verl freezes the tower with its projector."""
    if argument.value.lower() == "true":
        draft.set(argument, row.key, Setting(value=list(VISION_PARTS)))
    else:
        draft.report(argument, Kind.dropped, "is off, which is the default")


def _targets(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value == "all-linear":
        draft.report(argument, Kind.dropped, "is the default of train.lora.target_modules")
    else:
        draft.set(argument, row.key, as_paths(hydra_list(argument.values)))


def _minutes(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    # verl counts seconds.
    minutes = max(1, round((number_of(argument) or 600) / 60))
    draft.set(argument, row.key, Setting(value=minutes), note="minutes instead of seconds")


def _engine(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    note = "" if argument.value == "sglang" else f"engines are SGLang's, not {argument.value}'s"
    draft.set(argument, row.key, Setting(value="sglang"), note=note)


def _topk(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if number_of(argument) == 0:
        draft.set(argument, row.key, Setting(value=-1), note="0 and -1 turn it off in verl, -1 here")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _megabytes(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    number = number_of(argument)
    draft.set(argument, row.key, Setting(value=int((number or 2048) * 2**20)), note="bytes instead of megabytes")


def _multiturn(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_off = argument.value.lower() in ("false", "null", "")
    used = draft.given(f"{ROLLOUT}multi_turn.enable")
    unused = used is not None and used.value.lower() == "false"
    is_default = argument.value.lower() in default_values().get(argument.plain_name, ())
    draft.report(argument, Kind.dropped if is_off or unused or is_default else Kind.lost, row.note)


def _valtemp(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    sample = draft.given(f"{ROLLOUT}val_kwargs.do_sample")
    if sample is None or sample.value.lower() != "true":
        text = "verl samples evaluations only with do_sample=True; otherwise it is greedy"
        draft.findings.append(Finding(kind=Kind.wrong, subject=argument.text, text=text, source=argument.source))
    draft.rename(argument, replace(row, conversion=""))


def _valsample(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value.lower() == "false":
        draft.set(argument, "eval.temperature", Setting(value=0))
    else:
        draft.report(argument, Kind.dropped, row.note)


def _weights_of(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """Importance weights between trainer and engine."""
    if argument.value.lower() in ("null", "none"):
        draft.report(argument, Kind.dropped, "is off")
        return
    bypass, loss = (draft.given(f"algorithm.rollout_correction.{name}") for name in ("bypass_mode", "loss_type"))
    if bypass is not None and bypass.value.lower() == "true" and (loss is None or loss.value == "ppo_clip"):
        text = (
            "has no effect on the loss with bypass_mode: the ratio is that to the engine, and verl reports the weight"
        )
        draft.report(argument, Kind.dropped, text)
        return
    draft.set(argument, "algo.use_tis", Setting(value=True))
    if argument.value == "sequence":
        draft.settings["algo.tis_type"] = Setting(value="mis")
        draft.settings["algo.mis.level"] = Setting(value="sequence")


def _normalizes(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    """A mean weight of 1, which masked importance sampling has; by itself it truncates as verl does."""
    if argument.is_on:
        draft.settings["algo.tis_type"] = Setting(value="mis")
    draft.rename(argument, replace(row, conversion=""))


def _unless_null(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_off = argument.value.lower() in ("null", "none", "false", "")
    draft.report(argument, Kind.dropped if is_off else Kind.lost, "is off" if is_off else row.note)


def _reward_function(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value.lower() in ("null", "none", ""):
        draft.report(argument, Kind.dropped, "is not set")
        return
    name = draft.given("custom_reward_function.name")
    path = argument.value.removesuffix(".py").strip("/")
    # A file is named in verl, a module here; files of absolute paths need their folder on PYTHONPATH.
    module = path.replace("/", ".") if not argument.value.startswith("/") else PurePosixPath(path).name
    function = "compute_score" if name is None else name.value
    draft.set(argument, row.key, Setting(value=f"{re.sub(r'[^A-Za-z0-9_.]', '_', module)}:{function}"))
    text = "verl calls compute_score(data_source, solution_str, ground_truth, extra_info): sample.metadata has the last"
    draft.note(Kind.hook, function, f"{text}, sample.prompt.label the third; rlscale calls (sample)")


def _manager(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value == "dapo":
        draft.set(argument, row.key, Setting(value="dapo"))
        draft.settings["reward.key"] = Setting(value="score")
    elif argument.value == "naive":
        draft.report(argument, Kind.dropped, "data.reward_by_source chooses rewards by data_source")
    else:
        draft.report(argument, Kind.lost, "write a reward.custom_path")


def _reward_model(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    used = draft.given("reward_model.enable")
    is_on = used is not None and used.value.lower() == "true"
    draft.report(argument, Kind.lost if is_on else Kind.dropped, row.note if is_on else "no reward model is enabled")


def _overlong(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_on = any(
        (found := draft.given(f"reward_model.{part}.enable")) is not None and found.value.lower() == "true"
        for part in ("reward_kwargs.overlong_buffer_cfg", "overlong_buffer")
    )
    if not row.key:
        draft.report(argument, Kind.dropped, row.note)
    elif is_on:
        draft.rename(argument, replace(row, conversion=""))
    else:
        draft.report(argument, Kind.dropped, "the penalty is not enabled")


def _overlong_prompts(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    kind = Kind.dropped if argument.value.lower() == "true" else Kind.changed
    if kind is Kind.dropped:
        draft.report(argument, kind, row.note)
    else:
        draft.report(argument, Kind.lost, row.note)


def _truncation(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.report(argument, Kind.dropped if argument.value == "error" else Kind.lost, row.note)


def _image(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    # A resolved configuration has the column in every run.
    if argument.source.file.endswith((".yaml", ".yml", ".json")):
        draft.report(argument, Kind.dropped, "has verl's default value")
        return
    draft.set(argument, row.key, Setting(value={"image": argument.value}))


def _critic(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    policy = draft.given("actor_rollout_ref.model.path")
    estimator = draft.given("algorithm.adv_estimator")
    if estimator is not None and estimator.value != "gae":
        draft.report(argument, Kind.dropped, "there is no critic")
    elif policy is not None and policy.value == argument.value:
        draft.report(argument, Kind.dropped, "a critic starts from the model of the policy")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _freq(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    number = number_of(argument)
    if number is not None and number <= 0:
        draft.report(argument, Kind.dropped, "turns it off, which is the default")
    else:
        draft.rename(argument, replace(row, conversion=""))


def _not(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    draft.set(argument, row.key, Setting(value=argument.value.lower() == "false"))


def _logger(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    names = [value_of(each) for each in hydra_list(argument.values)]
    known = [name for name in names if name in ("wandb", "tensorboard")]
    lost = [name for name in names if name not in ("wandb", "tensorboard", "console", "file")]
    for name in known[1:]:
        draft.settings[f"logging.{name}.enabled"] = Setting(value=True)
    if lost:
        draft.note(Kind.lost, f"{argument.name} {', '.join(lost)}", "metrics go to JSONL, wandb and TensorBoard")
    if known:
        draft.set(argument, f"logging.{known[0]}.enabled", Setting(value=True))
    else:
        draft.report(argument, Kind.dropped, "metrics are always printed and written as JSONL")


def _resume(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value == "disable":
        draft.report(argument, Kind.dropped, "a run with another run.name starts from its first rollout")
    else:
        draft.report(argument, Kind.dropped, row.note)


def _config_name(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    stem = PurePosixPath(argument.value).name.removesuffix(".yaml")
    if PurePosixPath(argument.value).stem in draft.reading.configs:
        draft.report(argument, Kind.dropped, "the values of the file are among the arguments")
    elif not OWN_CONFIG.fullmatch(stem):
        text = (
            f"{argument.value or 'the file'} is neither next to the script nor in its config path; copy it there, or "
        )
        draft.report(argument, Kind.lost, text + "translate what the same command prints with --cfg job --resolve")
    elif "megatron" in stem:
        draft.set(argument, "train.backend", Setting(value="megatron"))
    else:
        draft.report(argument, Kind.dropped, "is verl's own configuration")


def _separate(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    nodes, gpus = (number_of(draft.given(f"rollout.{name}")) for name in ("nnodes", "n_gpus_per_node"))
    if not row.key:
        draft.report(argument, Kind.dropped, "cluster.rollout_num_gpus counts the GPUs of all nodes")
    else:
        draft.set(argument, row.key, Setting(value=int((nodes or 1) * (gpus or 8))), note="the GPUs of all nodes")


def _dtype(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_default = argument.value in ("fp32", "float32")
    draft.report(argument, Kind.dropped if is_default else Kind.lost, row.note)


def _unused(text: str) -> Conversion:
    def place(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
        draft.report(argument, Kind.dropped, row.note or text)

    return place


def _critic_optimiser(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_default = argument.value.lower() in (default_values().get(argument.plain_name) or ("null", "0", "-1"))
    draft.report(argument, Kind.dropped if is_default else Kind.lost, row.note)


CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        **COMMON_CONVERSIONS,
        "offload": _offload,
        "fsdp": _fsdp,
        "alpha": _alpha,
        "library": _library,
        "librarynot": _librarynot,
        "bridge": _bridge,
        "distckpt": _distckpt,
        "replay": _replay,
        "gc": _checkpointing,
        "targets": _targets,
        "tower": _tower,
        "minutes": _minutes,
        "engine": _engine,
        "topk": _topk,
        "megabytes": _megabytes,
        "multiturn": _multiturn,
        "valtemp": _valtemp,
        "valsample": _valsample,
        "dosample": _unused("sampling is always on; rollout.temperature"),
        "is": _weights_of,
        "isnorm": _normalizes,
        "rs": _unless_null,
        "pf": _unless_null,
        "reward": _reward_function,
        "rewardname": _unused(""),
        "manager": _manager,
        "rm": _reward_model,
        "rmrest": _reward_model,
        "overlongbuffer": _overlong,
        "overlong": _overlong_prompts,
        "truncation": _truncation,
        "image": _image,
        "critic": _critic,
        "criticopt": _critic_optimiser,
        "freq": _freq,
        "not": _not,
        "logger": _logger,
        "resume": _resume,
        "configname": _config_name,
        "separate": _separate,
        "dtype": _dtype,
        "drop": place_as(Kind.dropped),
    }
)
"""Conversion of the table -> the function that places a key."""


# What a run means as a whole.


def _backend(draft: TranslationDraft) -> str:
    named = draft.given("--config-name") or draft.given("-cn")
    strategy = draft.given(f"{ACTOR}strategy")
    names = [*draft.reading.configs, "" if named is None else named.value]
    is_megatron = any("megatron" in name for name in names) or (strategy is not None and strategy.value == "megatron")
    return "megatron" if is_megatron else "fsdp"


def _launcher(draft: TranslationDraft) -> None:
    if "train.backend" not in draft.settings:
        draft.write("train.backend", Setting(value=_backend(draft)), "the trainer of verl's configuration")
    if is_supervised(draft):
        draft.write("algo.loss_type", Setting(value="sft_loss"), f"{draft.reading.launcher} is supervised training")
    if "one_step_off_policy" in draft.reading.launcher:
        draft.write("rollout.max_staleness", Setting(value=1), "generation is one step ahead of training")
        draft.write("algo.decoupled_loss", Setting(value=False), "verl clips around the logprobs of its trainer")
        draft.settings["cluster.colocate"] = Setting(value=False)


def _batches(draft: TranslationDraft) -> None:
    """Batch sizes that verl takes from its defaults."""
    if is_supervised(draft):
        # One step of verl's supervised trainer is one batch.
        batch = draft.settings.get("batch.rollout_batch_size")
        if batch is not None:
            draft.write("batch.num_steps_per_rollout", Setting(value=1), "a batch is one step")
        return
    dynamic = draft.settings.get("batch.use_dynamic_batch_size")
    if dynamic is not None and dynamic.value is True and "batch.max_tokens_per_gpu" not in draft.settings:
        draft.write("batch.max_tokens_per_gpu", Setting(value=DEFAULT_TOKENS), "verl's default")
    if "batch.global_batch_size" not in draft.settings:
        number = int(DEFAULT_MINI_BATCH * (samples_per_prompt(draft) or 1))
        draft.write("batch.global_batch_size", Setting(value=number), "ppo_mini_batch_size is 256 prompts by default")
    nodes = draft.settings.get("cluster.actor_num_gpus_per_node")
    if nodes is not None and "cluster.num_gpus_per_node" not in draft.settings:
        draft.write("cluster.num_gpus_per_node", replace(nodes, comment=""), "the GPUs of a node")


def _groups_of_one(draft: TranslationDraft) -> None:
    """One sample of a prompt: verl subtracts 0 and divides by 1, where the mean would leave no advantage."""
    estimator = draft.given("algorithm.adv_estimator")
    if estimator is None or samples_per_prompt(draft) != 1 or is_supervised(draft):
        return
    if estimator.value in ("grpo", "grpo_vectorized", "rloo", "reinforce_plus_plus_baseline"):
        if estimator.value == "rloo":
            draft.settings["algo.advantage_estimator"] = Setting(
                value="grpo", comment="rloo of one sample is its reward"
            )
        reason = f"in a group of one sample {estimator.value} of verl has no baseline: the advantage is the reward"
        draft.write("algo.rewards_normalization", Setting(value=False), reason)


def _reward(draft: TranslationDraft) -> None:
    own = ("reward.type", "reward.custom_path", "reward.functions")
    if is_supervised(draft) or any(path in draft.settings for path in own):
        return
    reason = "verl chooses a reward by data_source; data.reward_by_source names others"
    draft.write("reward.type", Setting(value="math"), reason)
