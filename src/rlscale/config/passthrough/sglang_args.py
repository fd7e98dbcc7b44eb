"""The arguments of SGLang's server: names and types of those that `sglang.<name>` hands on."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rlscale.config.passthrough.recorded import Arguments, ask, recorded
from rlscale.config.passthrough.sglang_python import find_python, look_into

RECORDED = Path(__file__).with_name("sglang_arguments.json")
DISTRIBUTION = "sglang"
CLASSES = ("sglang.srt.server_args:ServerArgs",)

_EACH_SERVER = "leave it out: rlscale gives every server its own"
_PLACED = "leave it out: the cluster.* keys place the engines"
OURS: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "set model.hf_checkpoint",
        "dtype": "set train.dtype, which trainer and engine share",
        "device": "set cluster.device",
        "random_seed": "set rollout.seed",
        "context_length": "set rollout.max_context_len",
        "tp_size": "set cluster.rollout_num_gpus_per_engine, the GPUs of one engine",
        "enable_memory_saver": "set cluster.colocate",
        "enable_return_routed_experts": "set algo.use_rollout_routing_replay",
        "host": _EACH_SERVER,
        "port": _EACH_SERVER,
        "nccl_port": _EACH_SERVER,
        "api_key": _EACH_SERVER,
        "weight_version": "leave it out: the trainer counts its updates",
        "skip_server_warmup": "leave it out: the first rollout is the warm-up",
        "nnodes": _PLACED,
        "node_rank": _PLACED,
        "dist_init_addr": _PLACED,
        "base_gpu_id": _PLACED,
        "gpu_id_step": _PLACED,
        "use_ray": _PLACED,
        "custom_sigquit_handler": "leave it out: it is no plain value",
    }
)
"""Arguments that rlscale sets, and what to do instead of setting them."""


def known_arguments(python: str | None) -> Arguments:
    """The arguments of the SGLang that `sglang.python` has; those of the tested version where none is installed."""
    known = recorded(RECORDED)
    interpreter = find_python(python)
    try:
        version = look_into(interpreter).sglang
        if version is None or version == known.version:
            return known
        return ask(interpreter, version=version, distribution=DISTRIBUTION, classes=CLASSES)
    except (OSError, subprocess.SubprocessError, ValueError):
        return known  # that it cannot be used is reported where it is needed
