"""Unset keys are derived once and recorded; given values stay."""

import re
from copy import deepcopy
from operator import attrgetter
from typing import Any, get_origin

import pytest

from rlscale.config import (
    AttnImplementation,
    Device,
    DistributedBackend,
    RunConfig,
    TrainBackendName,
    changed_keys,
    config_hash,
    load_config_with_notes,
    to_yaml,
)
from rlscale.config.keys import keys
from rlscale.config.resolve.defaults import resolve
from rlscale.config.rules import PATHS
from tests.unit.config.rules.cases import CASES
from tests.unit.config.rules.valid_config import config_with, valid_config

PPO = {"algo.advantage_estimator": "ppo"}
ON_GPUS = {"cluster.device": Device.cuda}
STAGES = {
    "rollout.engine": "sglang",
    "sglang.server_args": {"pp_size": 2},
    "cluster.rollout_num_gpus_per_engine": 16,
    "cluster.rollout_num_gpus": 16,
}
"""An engine whose pipeline stages are on two nodes."""


def derive(values: dict[str, Any], *, has_cuda: bool = False) -> tuple[RunConfig, dict[str, Any]]:
    config, derived = resolve(config_with(values), has_cuda=lambda: has_cuda)
    return config, {each.key: each.value for each in derived}


def test_the_given_config_is_not_changed() -> None:
    given = valid_config()
    before = deepcopy(given)
    resolve(given, has_cuda=lambda: False)
    assert given == before


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), [case[:2] for case in CASES])
def test_a_config_that_breaks_a_rule_is_resolved(name: str, values: dict[str, Any]) -> None:
    config, _ = derive(values)
    assert config.run.dir is not None and config.cluster.device != Device.auto


def test_resolving_twice_derives_nothing_more() -> None:
    config, _ = derive({})
    assert resolve(config, has_cuda=lambda: False) == (config, [])


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"train.backend": "fsdp"}, "optim.lr", 2e-5),
        ({"train.backend": "megatron"}, "optim.lr", 1e-6),
        ({"algo.eps_clip": 0.3}, "algo.eps_clip_high", 0.3),
        ({}, "algo.decoupled_loss", False),
        ({"rollout.max_staleness": 1}, "algo.decoupled_loss", True),
        ({"rollout.max_staleness": 1, "algo.use_tis": True}, "algo.decoupled_loss", False),
        ({"rollout.max_staleness": 1, "algo.use_rollout_logprobs": True}, "algo.decoupled_loss", False),
        ({}, "batch.global_batch_size", 256),
        ({}, "batch.num_steps_per_rollout", 1),
        ({"batch.num_steps_per_rollout": 4}, "batch.global_batch_size", 64),
        ({"batch.global_batch_size": 32}, "batch.num_steps_per_rollout", 8),
        ({"batch.max_tokens_per_gpu": 99}, "batch.log_probs_max_tokens_per_gpu", 99),
        (
            {"cluster.rollout_num_gpus": None, "cluster.colocate": True, "cluster.actor_num_gpus_per_node": 4},
            "cluster.rollout_num_gpus",
            4,
        ),
        ({"algo.loss_type": "sft_loss"}, "cluster.rollout_num_gpus", 0),
        ({}, "train.weight_channel", "process_group"),
        ({"cluster.colocate": True}, "train.weight_channel", "shared_memory"),
        ({"cluster.colocate": True, "cluster.actor_num_nodes": 2}, "train.weight_channel", "process_group"),
        ({"cluster.colocate": True, "rollout.engine": "external"}, "train.weight_channel", "process_group"),
        ({"cluster.colocate": True, "cluster.actor_num_nodes": 2, **ON_GPUS}, "train.weight_channel", "shared_memory"),
        ({"cluster.colocate": True, "cluster.rollout_num_gpus": 2, **ON_GPUS}, "train.weight_channel", "disk"),
        ({**STAGES, **ON_GPUS}, "train.weight_channel", "disk"),
        ({**STAGES, "cluster.colocate": True, **ON_GPUS}, "train.weight_channel", "disk"),
        ({"rollout.max_context_len": 100}, "rollout.max_prompt_len", 99),
        ({"rollout.temperature": 0.7}, "eval.temperature", 0.7),
        ({"rollout.top_p": 0.9}, "eval.top_p", 0.9),
        ({"rollout.top_k": 5}, "eval.top_k", 5),
        ({"rollout.max_response_len": 7}, "eval.max_response_len", 7),
        ({"data.input_key": "q"}, "eval.input_key", "q"),
        ({}, "eval.label_key", "label"),
        ({"eval.prompt_data": ["f.jsonl"]}, "eval.prompt_data", ["eval", "f.jsonl"]),
        ({"optim.lr_warmup_iters": 5}, "optim.warmup_ratio", 0.0),
        ({"train.backend": "fsdp"}, "optim.warmup_ratio", 0.03),
        ({"train.backend": "megatron"}, "optim.warmup_ratio", 0.0),
        ({"cluster.colocate": True}, "cluster.offload_train", True),
        ({"cluster.colocate": True}, "cluster.offload_rollout", True),
        ({"cluster.offload": True}, "cluster.offload_train", True),
        ({"cluster.offload": True}, "cluster.offload_rollout", True),
        ({"algo.advantage_estimator": "ppo"}, "cluster.offload_train", True),
        ({"algo.advantage_estimator": "ppo"}, "cluster.offload_rollout", False),
        ({}, "cluster.offload_train", False),
        ({"cluster.colocate": True, "debug.rollout_only": True}, "cluster.offload_train", False),
        ({"cluster.offload": True, "algo.loss_type": "sft_loss"}, "cluster.offload", False),
        ({**PPO, "cluster.critic_num_nodes": 1}, "cluster.critic_num_gpus_per_node", 1),
        ({**PPO, "cluster.actor_num_nodes": 2, "cluster.critic_num_gpus_per_node": 1}, "cluster.critic_num_nodes", 2),
        ({**PPO, "cluster.critic_num_nodes": 1}, "cluster.offload_train", False),
        ({"algo.advantage_estimator": "ppo", "optim.lr": 3e-6}, "critic.lr", 3e-6),
        (
            {"algo.advantage_estimator": "ppo", "checkpoint.load": "/c", "model.hf_checkpoint": "/m"},
            "critic.load",
            "/c",
        ),
        ({"algo.advantage_estimator": "ppo", "model.hf_checkpoint": "/m"}, "critic.load", "/m"),
        ({"train.backend": "megatron", "train.dtype": "float32"}, "megatron.bf16", False),
        ({"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 4}, "cluster.num_gpus_per_node", 4),
        ({"model.max_position_embeddings": 99}, "megatron.max_position_embeddings", 99),
        (
            {"model.vocab_size": 101, "megatron.tensor_model_parallel_size": 4},
            "model.padded_vocab_size",
            104,
        ),
        ({}, "sampling.over_sampling_batch_size", 16),
        ({"rollout.external": True}, "rollout.engine", "external"),
        ({"rollout.engine": "external"}, "rollout.external", True),
        ({"rollout.function_path": "a:b"}, "eval.function_path", "a:b"),
        ({"data.tool_key": "tools"}, "eval.tool_key", "tools"),
        ({"train.keep_old_actor": True, "rollout.max_staleness": 1}, "train.reuse_logprobs", False),
        ({"algo.use_kl_loss": True, "model.hf_checkpoint": "/m"}, "model.ref_load", "/m"),
        (
            {"algo.kl_coef": 0.1, "algo.advantage_estimator": "rloo", "model.hf_checkpoint": "/m"},
            "model.ref_load",
            "/m",
        ),
        (
            {"algo.use_kl_loss": True, "model.hf_checkpoint": "/m", "checkpoint.load": "/c"},
            "model.ref_load",
            "/c",
        ),
        ({"model.warmup_experiment": "w", "run.experiment": "w"}, "model.warmup_experiment", None),
        ({"run.dir": "/tmp/x"}, "checkpoint.save", "/tmp/x/checkpoints"),
        ({"run.name": "x"}, "run.dir", "runs/x"),
    ],
)
def test_derived_values(given: dict[str, Any], key: str, value: Any) -> None:
    config, derived = derive(given)
    group, name = key.split(".")
    assert derived[key] == value == getattr(getattr(config, group), name)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 8}, 8),
        ({"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 2, "cluster.num_gpus_per_node": 4}, 4),
        ({"cluster.actor_num_gpus_per_node": 4}, 8),  # engines have the other GPUs of the node
        ({"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 4, "debug.train_only": True}, 8),
    ],
)
def test_other_nodes_keep_their_size(values: dict[str, Any], expected: int) -> None:
    config, derived = derive(values)
    assert config.cluster.num_gpus_per_node == expected and "cluster.num_gpus_per_node" not in derived


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optimizer_cpu_offload": True}, 1.0),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 0.5),
        ({"optimizer_cpu_offload": False}, None),
        ({}, None),
    ],
)
def test_the_whole_optimizer_is_offloaded_unless_a_fraction_is_given(given: dict[str, Any], expected: Any) -> None:
    values = {"train.backend": TrainBackendName.megatron, "megatron.core_args": dict(given)}
    config, derived = derive(values)
    assert config.megatron.core_args.get("optimizer_offload_fraction") == expected
    is_derived = expected == 1.0
    assert derived.get("megatron.optimizer_offload_fraction") == (1.0 if is_derived else None)
    assert resolve(config, has_cuda=lambda: False) == (config, [])


def test_a_critic_on_the_policys_gpus_has_no_separate_gpus() -> None:
    config, derived = derive(PPO)
    assert (config.cluster.critic_num_nodes, config.cluster.critic_num_gpus_per_node) == (None, None)
    assert not {"cluster.critic_num_nodes", "cluster.critic_num_gpus_per_node"} & set(derived)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", 0.0),
        ("algo.eps_clip_high", 0.5),
        ("eval.temperature", 0.0),
        ("eval.top_k", 3),
        ("batch.log_probs_max_tokens_per_gpu", 3),
        ("model.warmup_experiment", "other"),
        ("run.name", "mine"),
        ("checkpoint.save", "/c"),
    ],
)
def test_given_values_stay(key: str, value: Any) -> None:
    config, derived = derive({key: value, "batch.max_tokens_per_gpu": 99})
    group, name = key.split(".")
    assert getattr(getattr(config, group), name) == value and key not in derived


def test_values_that_need_cuda_are_replaced_without_it() -> None:
    config, derived = derive({"train.backend": TrainBackendName.fsdp})
    assert config.cluster.device is Device.cpu
    assert derived["fsdp.attn_implementation"] is AttnImplementation.sdpa
    assert "fsdp.attn_implementation" not in derive({"train.backend": TrainBackendName.megatron})[1]
    assert derived["cluster.distributed_backend"] is DistributedBackend.gloo


def test_values_that_need_cuda_stay_with_it() -> None:
    config, derived = derive({}, has_cuda=True)
    assert config.cluster.device is Device.cuda
    assert not {"fsdp.attn_implementation", "cluster.distributed_backend"} & set(derived)


def test_a_given_device_decides() -> None:
    assert derive({"cluster.device": Device.cpu}, has_cuda=True)[0].cluster.distributed_backend == "gloo"
    assert derive({"cluster.ray_address": "1.2.3.4:5"})[0].cluster.device is Device.cuda
    eager, _ = derive({"fsdp.attn_implementation": AttnImplementation.eager})
    assert eager.fsdp.attn_implementation is AttnImplementation.eager


def test_the_name_changes_with_numeric_settings_only() -> None:
    plain, _ = derive({})
    for same in (
        {"run.dir": "/x"},
        {"logging.interval": 5},
        {"debug.logprob_diff_warn": 1.0},
        {"checkpoint.save": "/c"},
    ):
        assert config_hash(derive(same)[0]) == config_hash(plain)
    for other in ({"optim.lr": 0.1}, {"train.seed": 5}, {"data.num_rollout": 4}):
        assert derive(other)[0].run.name != plain.run.name


def test_a_new_secret_is_the_same_run() -> None:
    old, new = (derive({"train.env_vars": {"HF_TOKEN": value, "NCCL_DEBUG": "INFO"}})[0] for value in ("a", "b"))
    assert config_hash(old) == config_hash(new)
    assert changed_keys(to_yaml(old), to_yaml(new)) == []
    other = derive({"train.env_vars": {"HF_TOKEN": "a", "NCCL_DEBUG": "WARN"}})[0]
    assert config_hash(other) != config_hash(old)


@pytest.mark.parametrize("given", ["train=megatron", "fsdp.attn_implementation=eager"])
def test_a_switch_that_is_typed_and_has_no_effect_is_reported(given: str) -> None:
    """Also one that is on by default."""
    assert not load_config_with_notes([given]).warnings
    (warning,) = load_config_with_notes([given, "train.share_prompts=true"]).warnings
    assert warning.startswith("train.share_prompts is ignored: ")


def test_the_notes_are_returned() -> None:
    loaded = load_config_with_notes(["algo.kl_loss_coef=0.1"])
    assert {each.key for each in loaded.derived} >= {"algo.eps_clip_high", "run.name", "run.dir"}
    assert all(each.why for each in loaded.derived)
    assert loaded.warnings == ("algo.kl_loss_coef is ignored: algo.use_kl_loss is false",)
    assert loaded.overrides == ("algo.kl_loss_coef=0.1",) and loaded.config.run.experiment == "quickstart"


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ([], None),
        (["algo=dapo"], "rlscale.rollout.group_filters:reward_std"),
        (["algo.dynamic_sampling=true"], "rlscale.rollout.group_filters:reward_std"),
        (["algo=dapo", "algo.dynamic_sampling=false"], None),
        (["algo=dapo", "sampling.dynamic_filter_path=my_filters:keep"], "my_filters:keep"),
    ],
)
def test_dapo_selects_a_filter_unless_one_is_set(overrides: list[str], path: str | None) -> None:
    loaded = load_config_with_notes(["experiment=quickstart", *overrides])
    assert loaded.config.sampling.dynamic_filter_path == path


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, _ = derive({"run.dir": "~/runs/a", "checkpoint.save_hf": "~/hf/{rollout_id}", "train.weight_folder": "w~"})
    assert (config.run.dir, config.checkpoint.save) == ("/home/me/runs/a", "/home/me/runs/a/checkpoints")
    assert (config.checkpoint.save_hf, config.train.weight_folder) == ("/home/me/hf/{rollout_id}", "w~")


@pytest.mark.parametrize("key", PATHS)
def test_every_path_begins_at_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    is_list = get_origin(keys()[key].type) is list
    config, derived = resolve(config_with({key: ["a", "~/x"] if is_list else "~/x"}), has_cuda=lambda: False)
    assert attrgetter(key)(config) == (["a", "/home/me/x"] if is_list else "/home/me/x")
    assert [each.why for each in derived if each.key == key] == ["~ is the home folder"]


def test_no_path_is_missing() -> None:
    names = re.compile(r"_dir|\.dir|_?folders?|_?load|\.save|save_|_data|_files|hf_checkpoint|script_path|\.config$")
    found = {path for path, key in keys().items() if key.type in (str, list[str]) and names.search(path)}
    no_paths = {"run.config_dir", "sandbox.read_only_folders", "data.data_source_path"}
    no_paths |= {"train.rollout_data_postprocess_path"}
    assert {*found, "debug.dump_details"} - no_paths == set(PATHS)


def test_paths_of_libraries_begin_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, _ = derive({"sglang.server_args": {"chat_template": "~/a.jinja", "log_level": "~"}})
    assert config.sglang.server_args == {"chat_template": "/home/me/a.jinja", "log_level": "~"}
