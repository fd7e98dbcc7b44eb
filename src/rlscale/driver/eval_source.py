"""Weights for `rlscale-eval`: of a run, a checkpoint, a Hugging Face folder or a hub id; and the config for them.

The overrides of the run come first, without those of training; then those of the command; then those that make the run
an evaluation: engines, no trainer and no rollouts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.config import LossType, TrainBackendName
from rlscale.config.yaml_aliases import load_yaml
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.models.model_path import check_model_path
from rlscale.models.resolve_model import is_hf_folder
from rlscale.observe.evaluation_files import Measured
from rlscale.observe.jsonl import read_records
from rlscale.observe.provenance import CONFIG_FILE
from rlscale.secrets import REDACTED

SOURCE = "SOURCE"
FORCED: Mapping[str, str] = {
    "debug.rollout_only": "true",
    "data.num_rollout": "0",
    "data.num_epoch": "null",
    "data.start_rollout_id": "null",
    "eval.interval": "1",
    "eval.skip_eval_before_train": "false",
    "eval.stop_reward": "null",
    "eval.num_batches": "null",
    "checkpoint.load": "null",
    "model.warmup_experiment": "null",
    "run.resume_changed": "true",
}
"""Keys that make a run an evaluation."""

_GROUPS = ("", "run", "checkpoint", "train", "algo")
"""Groups of the recorded config that are read here; the empty name is a file that is no mapping."""

_OF_MODEL = ("model.build", "model.hf_checkpoint")
_MEGATRON_FIELDS = "model.use_hf_config_for_megatron"
_OF_TRAINING = ("run.", "logging.", "debug.", "ci.", "checkpoint.", "fault_tolerance.", "critic.", "optim")
"""Overrides of a run that its evaluation does not need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSource:
    """Weights to evaluate, and the overrides of the run that they come from."""

    name: str  # for the run folder
    weights: str  # folder or hub id as it is loaded; of a checkpoint the folder of the checkpoint
    version: int
    num_rollouts: int
    run: Path | None = None  # the run folder; None: there is none
    checkpoint: Checkpoint | None = None  # to be exported first; None: `weights` can be loaded
    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    is_sft: bool = False  # of the run
    is_megatron: bool = False  # its trainer

    @property
    def measured(self) -> Measured:
        """The weights for the record."""
        return Measured(version=self.version, num_rollouts=self.num_rollouts, weights=self.weights)


def find_source(given: str) -> EvalSource:
    """Resolves the argument of `rlscale-eval`.

    Raises:
        ConfigError: it is none of these; DataError: a file of the run cannot be read.
    """
    folder = Path(os.path.expanduser(given))
    if (folder / CONFIG_FILE).is_file():
        return _of_run(folder)
    if CheckpointStore.has_checkpoint(folder):
        return _of_checkpoint(folder)
    if folder.is_dir() and not is_hf_folder(given):
        fix = "name a run folder (config.yaml), a checkpoint (checkpoint.json) or a Hugging Face folder (config.json)"
        raise _error("be a run, a checkpoint or a model", given, f"it has none of their files; {fix}")
    if problems := check_model_path(given, name=SOURCE):
        raise ConfigError(problems)
    name = folder.resolve().name if folder.is_dir() else given.replace("/", "-")
    weights = str(folder.resolve()) if folder.is_dir() else given
    # Its config.json gives the architecture, not the option of an experiment.
    return EvalSource(name=name, weights=weights, version=0, num_rollouts=0, overrides=("model=hf",))


def find_run(given: str) -> EvalSource:
    """The run folder of `--regrade`. Raises ConfigError if it is none."""
    folder = Path(os.path.expanduser(given))
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError([_problem("be a run folder", given, "it has no config.yaml", path="--regrade")])
    values = _read_config(folder)
    return EvalSource(
        name=folder.resolve().name, weights="", version=0, num_rollouts=0, run=folder, **_recorded(values)
    )


def eval_overrides(source: EvalSource, given: Sequence[str], *, model: str | None = None) -> list[str]:
    """The overrides of an evaluation.

    Args:
        given: of the command.
        model: folder or hub id of the weights; None: the model of the run, whose weights are not exported yet.

    Raises:
        ConfigError: the command sets a key that the evaluation itself sets.
    """
    names = [_name(text) for text in given]
    reserved = {**FORCED, **dict.fromkeys(_OF_MODEL)}
    problems = [
        _problem("not be set here", text.partition("=")[2] or "nothing", "remove it; rlscale-eval sets it", path=name)
        for text, name in zip(given, names, strict=True)
        if name in reserved
    ]
    if problems:
        raise ConfigError(problems)
    overrides = [text for text in source.overrides if _is_kept(text, names) and _name(text) not in FORCED]
    overrides += given
    if "eval.prompt_data" in names and "eval.config" not in names:
        overrides.append("eval.config=null")  # it would take precedence over the sets of the command
    if source.is_sft and "algo" not in names:
        # One that generates, and accepts any number of samples per prompt.
        overrides += ["algo=grpo", f"algo.loss_type={LossType.policy_loss}", "algo.rewards_normalization=false"]
    if not {"run.name", "run.dir"} & set(names):
        overrides.append(f"run.name={quoted(f'eval-{source.name}-v{source.version}')}")
    overrides += [f"{key}={value}" for key, value in FORCED.items()]
    if model is not None:
        overrides = [text for text in overrides if _name(text) not in _OF_MODEL]
        overrides += ["model.build=null", f"model.hf_checkpoint={quoted(model)}"]
        if source.is_megatron and _MEGATRON_FIELDS not in names:
            # A built model has the fields of Megatron-core; those of a folder are in its config.json.
            overrides.append(f"{_MEGATRON_FIELDS}=true")
    return overrides


def export_folder(source: EvalSource, root: Path) -> Path:
    """The place of the exported weights of a checkpoint in the cache; another one after it was written again."""
    assert source.checkpoint is not None, "only a checkpoint is exported"
    folder = source.checkpoint.folder.resolve()
    written = (folder / "checkpoint.json").stat().st_mtime_ns
    digest = hashlib.blake2b(f"{folder}/{written}".encode(), digest_size=6).hexdigest()
    return root / "exports" / f"{folder.name}-{digest}"


def quoted(value: str) -> str:
    """A string as the value of an override."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _of_run(folder: Path) -> EvalSource:
    values = _read_config(folder)
    name = folder.resolve().name
    recorded = _recorded(values)
    places = [folder / "checkpoints", Path(str((values.get("checkpoint") or {}).get("save") or folder / "checkpoints"))]
    place = next((each for each in places if CheckpointStore.has_checkpoint(each)), None)
    exported, finished = folder / "hf", folder / "finished.json"
    if finished.is_file() and is_hf_folder(str(exported)):
        version, num_rollouts = _last_version(folder)
        weights = str(exported.resolve())
        return EvalSource(
            name=name, weights=weights, version=version, num_rollouts=num_rollouts, run=folder, **recorded
        )
    if place is None:
        fix = "it has neither a checkpoint nor a finished export in hf/; wait for its first checkpoint"
        raise _error("be a run with weights", str(folder), fix)
    return _of_saved(CheckpointStore.resolve(place, key=SOURCE), folder, name=name, recorded=recorded)


def _of_checkpoint(folder: Path) -> EvalSource:
    checkpoint = CheckpointStore.resolve(folder, key=SOURCE)
    run = next((each for each in checkpoint.folder.resolve().parents if (each / CONFIG_FILE).is_file()), None)
    if run is None:
        fix = "no folder above it has config.yaml, which names its model; pass the run folder"
        raise _error("be a checkpoint inside of its run folder", str(folder), fix)
    return _of_saved(checkpoint, run, name=run.name, recorded=_recorded(_read_config(run)))


def _of_saved(checkpoint: Checkpoint, run: Path, *, name: str, recorded: Mapping[str, Any]) -> EvalSource:
    progress = checkpoint.state["progress"]
    return EvalSource(
        name=name,
        weights=str(checkpoint.folder.resolve()),
        version=int(progress["version"]),
        num_rollouts=int(progress["next_rollout"]),
        run=run,
        checkpoint=checkpoint,
        **recorded,
    )


def _recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    run = values.get("run") or {}
    overrides = [str(text) for text in run.get("overrides") or ()]
    config_dir = run.get("config_dir")
    return {
        "overrides": tuple(overrides),
        "config_dir": None if config_dir is None else Path(config_dir),
        "is_megatron": (values.get("train") or {}).get("backend") == TrainBackendName.megatron,
        "is_sft": (values.get("algo") or {}).get("loss_type") == LossType.sft_loss,
    }


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_FILE
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} must be the config of a run, got {' '.join(str(error).split())}") from error
    groups = values if isinstance(values, Mapping) else {"": values}
    wrong = [name or str(group)[:60] for name, group in groups.items() if name in _GROUPS and not _is_group(group)]
    if not wrong and not isinstance((groups.get("run") or {}).get("overrides") or [], list):
        wrong = ["run.overrides"]
    if wrong:
        raise DataError(f"{path} must be the config of a run, got {wrong[0]}; pass the run folder")
    return groups


def _is_group(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _last_version(folder: Path) -> tuple[int, int]:
    """The weight version of the export of a finished run, and the number of its rollouts."""
    path = folder / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    steps = [record for record in records if "weights/version" in record]
    if not steps:
        return 0, 0
    return int(steps[-1]["weights/version"]), int(steps[-1]["step"]) + 1


def _is_kept(text: str, given: Sequence[str]) -> bool:
    """Whether an override of the run still counts: neither of training, nor replaced by the command."""
    name = _name(text)
    if REDACTED in text or name.startswith(_OF_TRAINING):
        return False
    return not any(_replaces(other, name) for other in given)


def _replaces(given: str, name: str) -> bool:
    is_data = {given, name} <= {"eval.config", "eval.prompt_data"}
    # An option of a group stands for the whole group.
    return given == name or is_data or ("." not in given and name.startswith(f"{given}."))


def _name(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].strip()


def _problem(rule: str, value: str, fix: str, *, path: str = SOURCE) -> Problem:
    return Problem(path=path, rule=rule, value=value, fix=fix)


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([_problem(rule, value, fix)])
