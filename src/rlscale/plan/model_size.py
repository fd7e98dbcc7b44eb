"""The architectures of the models of a run, from its config or from checkpoints on this machine."""

from __future__ import annotations

from rlscale.architectures.architecture import REQUIRED_FIELDS, Architecture
from rlscale.architectures.hf_config import architecture_fields, read_hf_fields
from rlscale.config import ModelConfig
from rlscale.errors import ConfigError, Problem


def policy_architecture(model: ModelConfig) -> Architecture:
    """The architecture of the policy: fields of the config, else of the checkpoint's `config.json`.

    Raises:
        ConfigError: fields are missing, and no `config.json` on this machine contains them.
    """
    fields = architecture_fields(vars(model), build=model.build, hf_checkpoint=model.hf_checkpoint)
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if missing:
        fix = "choose a model whose fields are known (model=qwen3_4b), set it, or use a checkpoint on this machine"
        raise ConfigError(
            [Problem(path=f"model.{name}", rule="be known to plan a run", value="null", fix=fix) for name in missing]
        )
    return Architecture.from_fields(fields)


def reference_architecture(model: ModelConfig, policy: Architecture) -> Architecture:
    """The architecture of the reference: that of `model.ref_load` if its `config.json` is found, else the policy's."""
    fields = read_hf_fields(model.ref_load)
    return Architecture.from_fields(fields) if all(name in fields for name in REQUIRED_FIELDS) else policy


def route_bytes_per_token(a: Architecture) -> int:
    """Bytes of the expert indices of one token. Same as `types.RouteShape`, whose module imports numpy."""
    return a.num_layers * a.experts_per_token * (1 if a.num_experts <= 255 else 2)
