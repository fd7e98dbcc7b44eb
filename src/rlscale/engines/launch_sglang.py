"""Starts a real SGLang server in the interpreter that has SGLang."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlscale.config.passthrough.sglang_python import foreign_environment
from rlscale.config.server_groups import ServerGroup, ServerRole
from rlscale.engines.launch import API_KEY_VARIABLE, EngineLaunch, ProcessPlace, device_variables
from rlscale.engines.sglang.prefill_decode import SeparateAddress
from rlscale.types import EngineAddress
from rlscale.weight_types import POLICY_ADAPTER

SERVE = Path(__file__).with_name("sglang") / "serve.py"

ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
    "sleep_on_idle": True,  # otherwise it uses a whole core while it waits
}
"""Arguments to run on a CPU, with memory and cores left for the trainer on the same machine."""


LORA_ON_CPU: Mapping[str, Any] = {"lora_backend": "torch_native"}
"""The only kernels of adapters that need no GPU."""

IGNORE_PINNING = "RLSCALE_IGNORE_PINNING"
"""Variable with which `serve.py` ignores requests for page-locked memory."""

CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"
"""Variable with the cores of each rank of a process on a CPU, e.g. `0-1|2-3`."""

MODEL_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""Variable with a package whose classes of models take precedence over SGLang's."""

FEATURE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
"""Variable with the size of the cache of image features."""

IMAGE_CACHE_MB = 256
"""Size of the cache of pixels, which do not depend on weights."""

HOST_IP = "SGLANG_HOST_IP"
"""Variable with the address at which prefill and decode servers exchange the KV cache."""

DRAFT_MODEL = "speculative_draft_model_path"
MODEL_OVERRIDES = "json_model_override_args"
"""Argument with entries that replace those of the model's `config.json`."""

REWARD_MODELS = "rlscale_reward_models"
"""The package next to `serve.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangLora:
    """The adapters that a server may load."""

    rank: int  # at most
    target_modules: tuple[str, ...]  # last name components of the layers that may have one
    num_versions: int  # that requests use at once


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangLaunch(EngineLaunch):
    """One SGLang engine on GPUs, with a process on each of its nodes, or on the CPU."""

    python: Path
    num_gpus: int = 1  # of all its processes; with groups `for_engine` sets it
    releases_memory: bool = False  # while the trainer works
    returns_routes: bool = False
    # False: weights change without a flush, so a shared cache would mix versions.
    shares_prefixes: bool = True
    reads_images: bool = False
    server_args: Mapping[str, Any] = field(default_factory=dict)  # set by the user, with SGLang's names
    groups: tuple[ServerGroup, ...] = ()  # of all engines; `for_engine` gives an engine its role
    role: ServerRole | None = None  # None: the engine computes whole requests
    # `quantization_config` of the weights that a sync sends; None: those of the model.
    quantization: Mapping[str, Any] | None = None
    lora: SglangLora | None = None  # None: weights are sent with the adapters added to them

    @property
    def num_ranks(self) -> int:
        return self.num_gpus

    @property
    def needs_rendezvous(self) -> bool:
        # With data-parallel attention SGLang otherwise derives ports from its own without looking for free ones.
        given = self.server_args
        return bool(given.get("enable_dp_attention")) or int(given.get("attn_dp_size") or 1) > 1

    @property
    def needs_bootstrap_port(self) -> bool:
        return self.role == ServerRole.prefill

    @property
    def keeps_draft(self) -> bool:
        """Whether another model than the policy drafts tokens."""
        return self.server_args.get(DRAFT_MODEL) not in (None, self.model_path)

    def for_engine(self, number: int) -> EngineLaunch:
        first = 0
        for group in self.groups:
            first += group.num_engines
            if number < first:
                arguments, size = {**self.server_args, **group.server_args}, group.num_gpus_per_engine
                return replace(self, role=group.role, num_gpus=size, server_args=arguments, groups=())
        assert not self.groups, f"the groups must have engine {number}"
        return self

    def address(self, place: ProcessPlace) -> EngineAddress:
        if self.role is None:
            address = replace(EngineLaunch.address(self, place), keeps_draft=self.keeps_draft)
            return replace(address, adapter=POLICY_ADAPTER, names_versions=True) if self.lora is not None else address
        return SeparateAddress(
            name=self.name,
            url=place.url,
            num_ranks=self.num_ranks,
            api_key=self.api_key,
            keeps_draft=self.keeps_draft,
            role=self.role,
            bootstrap_port=place.bootstrap_port,
        )

    def arguments(self, place: ProcessPlace) -> dict[str, Any]:
        given = {name: value for name, value in self.server_args.items() if value is not None}
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "host": place.host,
            "port": place.port,
            "dtype": self.dtype,  # otherwise the cache of a server on a CPU is float16
            "device": self.device,
            "random_seed": self.seed,
            "tp_size": self.num_gpus // int(given.get("pp_size", 1)),
            "skip_server_warmup": True,
            "log_level_http": "warning",  # otherwise one line for each request
        }
        if place.rendezvous is not None:
            arguments |= {
                "nnodes": place.num_nodes,
                "node_rank": place.node_rank,
                "dist_init_addr": place.rendezvous,
            }
        if self.role is not None:
            arguments["disaggregation_mode"] = str(self.role)
        if place.bootstrap_port is not None:
            arguments["disaggregation_bootstrap_port"] = place.bootstrap_port
        if self.max_context_len is not None:
            arguments["context_length"] = self.max_context_len
        if self.returns_routes:
            arguments["enable_return_routed_experts"] = True
        if not self.shares_prefixes:
            arguments["disable_radix_cache"] = True
        if self.reads_images:
            # With it SGLang takes token ids as they are; otherwise it decodes them and encodes the text again.
            arguments["mm_preprocess_cache_size_mb"] = IMAGE_CACHE_MB
        if self.quantization is not None:
            # The files have other weights; the first weight sync, before any request, sends all of them.
            arguments["load_format"] = "dummy"
            overrides = {**json.loads(given.pop(MODEL_OVERRIDES, "{}")), "quantization_config": self.quantization}
            arguments[MODEL_OVERRIDES] = json.dumps(overrides)
        if self.lora is not None:
            arguments |= _lora_arguments(self.lora)
        if self.device == "cpu":
            arguments |= ON_CPU if self.lora is None else {**ON_CPU, **LORA_ON_CPU}
        elif self.releases_memory:
            # Without it a release frees nothing.
            arguments["enable_memory_saver"] = True
            if self.keeps_draft:
                # Else its weights are lost with the memory, and no sync sends them again.
                arguments["enable_draft_weights_cpu_backup"] = True
        # Arguments of the user take precedence over all others.
        return arguments | given

    def command(self, place: ProcessPlace, log_folder: Path) -> list[str]:
        log_folder.mkdir(parents=True, exist_ok=True)
        file = log_folder / f"{self.file_name}_arguments.json"
        file.write_text(json.dumps(self.arguments(place), indent=2) + "\n", encoding="utf-8")
        return [str(self.python), str(SERVE), str(file)]

    def inherited(self, environment: Mapping[str, str]) -> dict[str, str]:
        return foreign_environment(environment)

    def variables(self, place: ProcessPlace) -> dict[str, str]:
        # Otherwise /health generates a token: it fails while generation is paused, and no cache can be flushed while it
        # runs. SGLang's watchdog ends a scheduler that hangs.
        variables = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"} | device_variables(place)
        if self.server_args.get("is_embedding") and MODEL_PACKAGE not in os.environ:
            variables[MODEL_PACKAGE] = REWARD_MODELS
        if self.reads_images and FEATURE_CACHE not in os.environ:
            # SGLang keeps features of images across weight updates, also when its caches are flushed.
            variables[FEATURE_CACHE] = "0"
        if self.role is not None and HOST_IP not in os.environ:
            # Otherwise SGLang opens ports at one of the machine's addresses, even for servers on loopback.
            variables[HOST_IP] = place.host
        if self.device == "cpu":
            # The threads of its processes compete for the cores: with two threads it is ten times slower.
            variables |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            if self.lora is not None:
                variables[IGNORE_PINNING] = "1"
            if self.num_gpus > 1 and CORES_OF_RANKS not in os.environ:
                # Without it SGLang refuses an engine with more ranks than this machine has NUMA nodes.
                own_ranks = self.num_gpus // place.num_nodes
                variables[CORES_OF_RANKS] = split_cores(sorted(os.sched_getaffinity(0)), own_ranks)
        return variables if self.api_key is None else variables | {API_KEY_VARIABLE: self.api_key}


def _lora_arguments(lora: SglangLora) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(lora.target_modules),
        # One more, for requests without an adapter or with a version that is about to be unloaded.
        "max_loras_per_batch": lora.num_versions + 1,
        "lora_strict_loading": True,  # otherwise tensors of unknown layers are only logged
    }


def split_cores(cores: Sequence[int], num_ranks: int) -> str:
    """The cores of each rank for SGLang: an equal share, or one core, which ranks share if there are too few."""
    share = max(1, len(cores) // num_ranks)
    starts = (rank * share % len(cores) for rank in range(num_ranks))
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)
