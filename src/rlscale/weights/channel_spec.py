"""Settings of a weight channel. Imports no torch, as the driver does without."""

from dataclasses import dataclass
from pathlib import Path

from rlscale.config import WeightChannelName, WeightPrecision


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSpec:
    """Everything about a weight channel that is known before its workers start."""

    name: WeightChannelName
    backend: str  # of a process group: "gloo" | "nccl"
    device: str  # of the weights: "cpu" | "cuda"
    bucket_bytes: int
    timeout_s: float
    folder: Path  # of disk and delta; trainer and engines see it under this path
    model_folder: Path  # configuration and tokenizer for full folders; need not exist
    num_adapters: int = 1  # versions that engines keep, with train.lora.sync=adapter
    shares_base: bool = False  # the jobs of a sweep use the same engines, so that their weights cannot be changed
    pause_mode: str = "retract"  # treatment of running requests during an update
    precision: WeightPrecision | None = None  # of linear layers as they are sent; None: as the trainer exports them
