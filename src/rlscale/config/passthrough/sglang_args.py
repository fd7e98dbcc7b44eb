"""Arguments of SGLang's server: names and types of the keys `sglang.<argument>`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rlscale.config.passthrough.recorded import LibraryArguments, query_interpreter, read_recorded
from rlscale.config.passthrough.sglang_python import find_python, installed_packages

RECORDED = Path(__file__).with_name("sglang_arguments.json")
DISTRIBUTION = "sglang"
CLASSES = ("sglang.srt.server_args:ServerArgs",)

_EACH_SERVER = "remove it: rlscale sets it for every server"
_PLACED = "remove it: the cluster.* keys place the engines"
_ADAPTERS = "remove it: train.lora.sync=adapter loads the adapters of the policy, as train.lora describes them"
_SEPARATED = "remove it: a file of sglang.config has a group with worker_type: prefill and one with worker_type: decode"
RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "set model.hf_checkpoint",
        "dtype": "set train.dtype, which trainer and engine share",
        "device": "set cluster.device",
        "random_seed": "set rollout.seed",
        "context_length": "set rollout.max_context_len",
        "tp_size": "set cluster.rollout_num_gpus_per_engine, the GPUs of one engine",
        "enable_memory_saver": "set cluster.offload_rollout",
        "enable_return_routed_experts": "set algo.use_rollout_routing_replay",
        "enable_lora": _ADAPTERS,
        "lora_paths": _ADAPTERS,
        "max_lora_rank": _ADAPTERS,
        "lora_target_modules": _ADAPTERS,
        "max_loaded_loras": "remove it: rlscale unloads the versions that no request uses",
        "host": _EACH_SERVER,
        "port": _EACH_SERVER,
        "nccl_port": _EACH_SERVER,
        "api_key": _EACH_SERVER,
        "admin_api_key": "remove it: SGLang would refuse weight updates with the key that rlscale sets",
        "weight_version": "remove it: the trainer counts its updates",
        "skip_server_warmup": "remove it: the first rollout is the warm-up",
        "disaggregation_mode": _SEPARATED,
        "disaggregation_bootstrap_port": "remove it: rlscale chooses a free port for every prefill server",
        "nnodes": _PLACED,
        "node_rank": _PLACED,
        "dist_init_addr": _PLACED,
        "base_gpu_id": _PLACED,
        "gpu_id_step": _PLACED,
        "use_ray": _PLACED,
        "custom_sigquit_handler": "remove it: it is not a plain value",
    }
)
"""Arguments that rlscale sets, with the advice for each."""


def load_arguments(
    python: str | None, *, recorded: Path = RECORDED, classes: Sequence[str] = CLASSES, kind: str = "arguments"
) -> LibraryArguments:
    """The arguments of the SGLang in `sglang.python`; those of the tested version when none is installed.

    Args:
        python: interpreter; None: the default one.
        recorded: file with the arguments of the tested version.
        classes: classes whose fields are the arguments.
        kind: of the arguments, for the name of the cached file.
    """
    known = read_recorded(recorded)
    # SGLang may be installed in another interpreter, so importlib.metadata cannot find it here.
    interpreter = find_python(python)
    try:
        version = installed_packages(interpreter).sglang
        if version is None or version == known.version:
            return known
        return query_interpreter(interpreter, version=version, distribution=DISTRIBUTION, classes=classes, kind=kind)
    except (OSError, subprocess.SubprocessError, ValueError):
        return known  # check_python reports an unusable interpreter
