"""The bytes of a checkpoint as the plan counts them, next to those of its files."""

from pathlib import Path

from safetensors import safe_open

from rlscale.config import load_config_with_notes
from rlscale.plan.checkpoint_size import CheckpointSize, checkpoint_size
from rlscale.plan.model_size import list_architectures, policy_architecture


def planned_size(model: str, *overrides: str) -> CheckpointSize:
    """The size that a plan of a run from a Hugging Face folder has."""
    given = ["model=hf", f"model.hf_checkpoint={model}", "train.dtype=float32"]
    config = load_config_with_notes([*given, "checkpoint.save=checkpoints", *overrides], to_run=False).config
    found = checkpoint_size(config, list_architectures(config, policy_architecture(config.model)))
    assert found is not None, "the run saves"
    return found


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of the tensors in a folder, by the first part of their names."""
    found: dict[str, int] = {}
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                part = name.split(".")[0]
                found[part] = found.get(part, 0) + tensors.get_tensor(name).nbytes
    return found
