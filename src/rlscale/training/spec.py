"""What a trainer rank needs to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlscale.config import AlgoConfig, FsdpConfig, OptimConfig, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The same for every rank; crosses to worker processes.

    Example:
        TrainerSpec(model_path="/models/qwen3", train=config.train, fsdp=config.fsdp, optim=config.optim,
                    algo=config.algo, temperature=1.0, max_response_len=1024, total_steps=200, device="cpu")
    """

    model_path: str  # Hugging Face folder or hub id
    train: TrainConfig
    fsdp: FsdpConfig
    optim: OptimConfig
    algo: AlgoConfig
    temperature: float  # of the rollouts; logits are divided by it
    max_response_len: int  # tokens of the longest response
    total_steps: int  # optimiser steps of the whole run
    device: str  # "cpu" | "cuda"
    ref_path: str | None = None  # reference model of a KL loss or penalty; None: there is none
    custom: Mapping[str, Any] = field(default_factory=dict)  # the config's node `custom`, for functions of the user
