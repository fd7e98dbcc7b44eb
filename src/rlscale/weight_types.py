"""Values of a weight sync that cross a process or a package: between trainers, engines and the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlscale.types import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightGroup:
    """Process group in which a trainer rank, rank 0 of the group, sends weights to engines."""

    name: str  # unique for the life of every member
    master_address: str
    master_port: int
    world_size: int
    backend: str  # "gloo" | "nccl"
    timeout_s: float
    num_links: int = 1  # connections between two members, used round-robin; above 1: gloo and our own servers only


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """Metadata of one bucket of weights. Lists are aligned; `checksums` are of the tensors as sent."""

    names: list[str]
    dtypes: list[str]  # "float32", "bfloat16"
    shapes: list[list[int]]
    checksums: list[str]  # empty if they are sent with the bytes
    load_format: str = "flattened_bucket"  # | "tensor_blocks"


POLICY_ADAPTER = "policy"
"""Name of the adapter that requests without a name use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterUpdate:
    """One version of a low-rank adapter, as it is sent to an engine."""

    name: str
    version: str
    config: Mapping[str, Any]  # of peft: r, lora_alpha, target_modules
    payload: str  # base64 of the tensors in the safetensors format, under peft's names
    checksums: Mapping[str, str]  # of each tensor as sent
    num_kept: int = 1  # newest versions that the engine keeps under this name; requests keep theirs longer
    sglang_payload: str = ""  # base64 of the tensors in the form that SGLang reads; empty: no engine is SGLang
    sha256: Mapping[str, str] = field(default_factory=dict)  # of each tensor's bytes, which SGLang compares
    is_repeated: bool = False  # this sender has sent it to the engine before


@dataclass(frozen=True, kw_only=True, slots=True)
class RankChecksums:
    """Checksums of the weights that one tensor-parallel rank of an engine holds, by the engine's names."""

    checksums: Mapping[str, str]
    rank: int = 0
    size: int = 1  # number of tensor-parallel ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncReport:
    """One finished weight sync."""

    version: WeightVersion
    num_buckets: int
    num_bytes: int
    seconds: float
