"""What is allowed but deserves a word: settings that do little good, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterable

from rlscale.architectures.hf_config import CONFIG_NAMES, TINY_MODELS
from rlscale.config.groups.algo import LossType, uses_reference
from rlscale.config.groups.fsdp import AttnImplementation
from rlscale.config.groups.logging import WandbMode
from rlscale.config.groups.optim import LrDecayStyle, OptimizerName
from rlscale.config.groups.rollout import EngineKind, UpdateMode
from rlscale.config.groups.train import QkvFormat, TrainBackendName, WeightChannelName
from rlscale.config.keys import keys
from rlscale.config.notes.algo import IGNORED_OF_ALGO, IgnoredKey, warn_algo
from rlscale.config.notes.parts import IGNORED_OF_PARTS
from rlscale.config.rules import uses_decoupled_loss, uses_engines, uses_router
from rlscale.config.run_config import RunConfig


def _is_sft(config: RunConfig) -> bool:
    return config.algo.loss_type == LossType.sft_loss


MOST_LINES = 3
"""Of a group, for one reason; an overlay that moves a recipe makes dozens of its keys idle at once."""

EVAL_DATA = ("eval.prompt_data", "eval.config")

OF_ENGINES = ("train.backend", "train.dtype", "batch.rollout_batch_size", "batch.n_samples_per_prompt")
"""Keys of the groups of the trainer that tell engines, too, what to do."""

OF_ROLES = (
    "algo.advantage_estimator",
    "algo.compute_advantages_and_returns",
    "algo.custom_advantage_function_path",
    "algo.kl_coef",
    "algo.loss_type",
    "algo.opd_kl_coef",
    "algo.use_kl_loss",
)
"""Keys of the algorithm that also decide which models are loaded."""

IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("batch.micro_batch_size",),
        when=lambda config: config.batch.use_dynamic_batch_size,
        why="batch.use_dynamic_batch_size packs by tokens",
    ),
    IgnoredKey(
        names=("batch.max_tokens_per_gpu", "batch.log_probs_max_tokens_per_gpu"),
        when=lambda config: not config.batch.use_dynamic_batch_size,
        why="batch.use_dynamic_batch_size is false",
    ),
    IgnoredKey(
        names=("rollout.num_slots", "rollout.deterministic"),
        when=lambda config: config.rollout.engine != EngineKind.embedded,
        why="only the embedded engine has it",
    ),
    IgnoredKey(
        names=("sglang",),
        when=lambda config: config.rollout.engine != EngineKind.sglang and not uses_router(config),
        why="rollout.engine is not sglang",
    ),
    IgnoredKey(
        names=("router",),
        when=lambda config: not uses_router(config),
        why="there is no router: router.enabled is off, or there is one engine or none",
    ),
    IgnoredKey(
        names=("train.weight_folder",),
        when=lambda config: config.train.weight_channel not in (WeightChannelName.disk, WeightChannelName.delta),
        why="train.weight_channel is neither disk nor delta",
    ),
    IgnoredKey(
        names=(
            "train.weight_channel",
            "train.weight_folder",
            "train.update_weights_interval",
            "train.update_weight_buffer_size",
        ),
        when=lambda config: not uses_engines(config),
        why="nothing is generated, so no engine needs the weights",
    ),
    IgnoredKey(
        names=("train.share_prompts",),
        when=lambda config: config.fsdp.attn_implementation == AttnImplementation.eager,
        why="fsdp.attn_implementation=eager attends to every sample by itself",
    ),
    IgnoredKey(
        names=("train.share_prompts",),
        when=lambda config: config.train.qkv_format == QkvFormat.bshd,
        why="train.qkv_format=bshd lays every sample down by itself",
    ),
    IgnoredKey(
        names=("fsdp",),
        when=lambda config: config.train.backend != TrainBackendName.fsdp,
        why="train.backend is not fsdp",
    ),
    IgnoredKey(
        names=(
            "megatron",
            "model.custom_model_provider_path",
            "model.megatron_to_hf_mode",
            "model.name",
            "model.padded_vocab_size",
            "model.use_hf_config_for_megatron",
        ),
        when=lambda config: config.train.backend != TrainBackendName.megatron,
        why="train.backend is not megatron",
    ),
    IgnoredKey(
        names=("buffer.fetch_trajectory_retry_times", "buffer.min_batch_collection_ratio", "buffer.task_type"),
        when=lambda config: config.buffer.url is None,
        why="buffer.url is not set",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("eval.") and path not in EVAL_DATA),
        when=lambda config: config.eval.prompt_data is None and config.eval.config is None,
        why="neither eval.prompt_data nor eval.config is set",
    ),
    IgnoredKey(
        names=("eval.prompt_data",),
        when=lambda config: config.eval.config is not None,
        why="eval.config is set and wins",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("eval.") and path != "eval.interval"),
        when=lambda config: config.eval.interval is None,
        why="eval.interval is not set",
    ),
    IgnoredKey(
        names=("algo.kl_loss_coef", "algo.use_unbiased_kl"),
        when=lambda config: not config.algo.use_kl_loss,
        why="algo.use_kl_loss is false",
    ),
    IgnoredKey(
        names=("algo.kl_loss_type", "model.ref_load"),
        when=lambda config: not uses_reference(config.algo),
        why="there is no reference model: neither algo.use_kl_loss nor algo.kl_coef is set",
    ),
    IgnoredKey(
        names=("rollout.max_staleness",),
        when=_is_sft,
        why="supervised training generates nothing ahead",
    ),
    IgnoredKey(
        names=("rollout.update_mode", "rollout.pause_mode"),
        when=lambda config: config.rollout.max_staleness == 0 or _is_sft(config),
        why="no request runs while weights change",
    ),
    IgnoredKey(
        names=("rollout.pause_mode",),
        when=lambda config: config.rollout.update_mode == UpdateMode.boundary,
        why="rollout.update_mode=boundary lets no request run while weights change",
    ),
    IgnoredKey(
        names=("algo.decoupled_weight_max",),
        when=lambda config: not uses_decoupled_loss(config)[0],
        why="algo.decoupled_loss is off",
    ),
    *IGNORED_OF_ALGO,
    *IGNORED_OF_PARTS,
    IgnoredKey(
        names=("reward",),
        when=lambda config: not uses_engines(config),
        why="nothing is generated, so nothing is scored",
    ),
    IgnoredKey(
        names=("eval", "router", "sglang"),
        when=lambda config: config.debug.train_only or config.debug.load_rollout_data is not None,
        why="only the trainer runs, by debug.train_only or debug.load_rollout_data",
    ),
    IgnoredKey(
        names=(
            "algo",
            "checkpoint.save_final",
            "checkpoint.save_hf",
            "checkpoint.save_interval",
            "critic",
            "debug.memory_snapshot_dir",
            "debug.profile_dir",
            "debug.profile_rollouts",
            "debug.save_train_data",
            "fault_tolerance",
            "fsdp",
            "megatron",
            "optim",
            "rollout.max_staleness",
            *(path for path in keys() if path.startswith("train.") and path not in OF_ENGINES),
            *(path for path in keys() if path.startswith("batch.") and path not in OF_ENGINES),
        ),
        when=lambda config: config.debug.rollout_only,
        why="nothing is trained, by debug.rollout_only",
    ),
    IgnoredKey(
        names=("optim", *(path for path in keys() if path.startswith("algo.") and path not in OF_ROLES)),
        when=lambda config: config.data.num_rollout == 0,
        why="data.num_rollout=0 only evaluates",
    ),
    IgnoredKey(
        names=("reward.type",),
        when=lambda config: config.reward.custom_path is not None,
        why="reward.custom_path is set and wins",
    ),
    IgnoredKey(
        names=("optim.min_lr", "optim.lr_decay_iters"),
        when=lambda config: config.optim.lr_decay_style == LrDecayStyle.constant,
        why="optim.lr_decay_style is constant",
    ),
    IgnoredKey(
        names=("optim.lr_decay_power",),
        when=lambda config: config.optim.lr_decay_style != LrDecayStyle.polynomial,
        why="optim.lr_decay_style is not polynomial",
    ),
    IgnoredKey(
        names=("optim.lr_wsd_decay_iters", "optim.lr_wsd_decay_style"),
        when=lambda config: config.optim.lr_decay_style != LrDecayStyle.wsd,
        why="optim.lr_decay_style is not wsd",
    ),
    IgnoredKey(
        names=("optim.muon_momentum",),
        when=lambda config: config.optim.name != OptimizerName.muon,
        why="optim.name is not muon",
    ),
    IgnoredKey(
        names=("data.prompt_data",),
        when=lambda config: not config.data.rollout_global_dataset,
        why="data.rollout_global_dataset is false",
    ),
    IgnoredKey(
        names=("data.num_epoch",),
        when=lambda config: config.data.num_rollout is not None,
        why="data.num_rollout is set and wins",
    ),
    IgnoredKey(
        names=("data.apply_chat_template_kwargs",),
        when=lambda config: not config.data.apply_chat_template,
        why="data.apply_chat_template is false",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("logging.wandb.") and path != "logging.wandb.enabled"),
        when=lambda config: not config.logging.wandb.enabled,
        why="logging.wandb.enabled is false",
    ),
    IgnoredKey(
        names=("logging.wandb.key", "logging.wandb.host"),
        when=lambda config: config.logging.wandb.mode == WandbMode.offline,
        why="logging.wandb.mode is offline",
    ),
    IgnoredKey(
        names=("logging.tensorboard.dir", "logging.tensorboard.project_name", "logging.tensorboard.experiment_name"),
        when=lambda config: not config.logging.tensorboard.enabled,
        why="logging.tensorboard.enabled is false",
    ),
    IgnoredKey(
        names=("logging.log_multi_turn", "logging.log_passrate", "logging.log_reward_category"),
        when=_is_sft,
        why="algo.loss_type is sft_loss",
    ),
    *(
        IgnoredKey(
            names=tuple(f"model.{name}" for name in CONFIG_NAMES if name not in figures),
            when=lambda config, build=build: config.model.build == build,  # type: ignore[misc]
            why=f"model.build={build} has no such figure",
        )
        for build, figures in TINY_MODELS.items()
    ),
    IgnoredKey(
        names=("model.init_seed",),
        when=lambda config: config.model.build is None,
        why="model.build is not set",
    ),
)


def warnings_of(config: RunConfig, set_keys: Iterable[str] = ()) -> list[str]:
    """One line for each doubtful setting, and for each key of `set_keys` that has no effect.

    Args:
        config: as given, before it is resolved.
        set_keys: keys that the command line or a YAML file sets to something else than the default.
    """
    return doubtful(config) + ignored(config, set_keys)


def ignored(config: RunConfig, set_keys: Iterable[str]) -> list[str]:
    """Keys that were set and have no effect in this run; one line for many of a group with one reason."""
    reasons: dict[str, str] = {}
    for path in sorted(set_keys):
        for entry in IGNORED:
            if any(path == name or path.startswith(f"{name}.") for name in entry.names) and entry.when(config):
                reasons.setdefault(path, entry.why)
    alike: dict[tuple[str, str], list[str]] = {}
    for path, why in reasons.items():
        alike.setdefault((path.rpartition(".")[0], why), []).append(path)
    return [line for (group, why), paths in alike.items() for line in _lines(group, why, paths)]


def _lines(group: str, why: str, paths: list[str]) -> list[str]:
    if len(paths) <= MOST_LINES:
        return [f"{path} is ignored: {why}" for path in paths]
    names = ", ".join(path.removeprefix(f"{group}.") for path in paths)
    return [f"{len(paths)} keys of {group} are ignored: {why} ({names})"]


def doubtful(config: RunConfig) -> list[str]:
    """Settings that are allowed and hardly ever meant."""
    return warn_algo(config)
