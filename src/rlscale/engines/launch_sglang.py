"""Starts a real SGLang server in the interpreter that has SGLang."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.config.passthrough.sglang_python import foreign_environment
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.server.http_server import API_KEY_VARIABLE

SERVE = Path(__file__).with_name("sglang") / "serve.py"

ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
    "sleep_on_idle": True,  # otherwise it uses a whole core while it waits
}
"""Arguments to run on a CPU, with memory and cores left for the trainer on the same machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangLaunch(EngineLaunch):
    """One SGLang server on the GPUs visible in its environment, or on the CPU."""

    python: Path
    num_gpus: int = 1
    shares_gpus: bool = False
    returns_routes: bool = False
    # False: weights change without a flush, so a shared cache would mix versions.
    shares_prefixes: bool = True
    server_args: Mapping[str, Any] = field(default_factory=dict)  # set by the user, with SGLang's names

    @property
    def num_ranks(self) -> int:
        return self.num_gpus

    def arguments(self, host: str, port: int) -> dict[str, Any]:
        """All arguments of the server, without the key."""
        given = {name: value for name, value in self.server_args.items() if value is not None}
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "host": host,
            "port": port,
            "dtype": self.dtype,  # otherwise the cache of a server on a CPU is float16
            "device": self.device,
            "random_seed": self.seed,
            "tp_size": self.num_gpus // int(given.get("pp_size", 1)),
            "skip_server_warmup": True,
            "log_level_http": "warning",  # otherwise one line for each request
        }
        if self.max_context_len is not None:
            arguments["context_length"] = self.max_context_len
        if self.returns_routes:
            arguments["enable_return_routed_experts"] = True
        if not self.shares_prefixes:
            arguments["disable_radix_cache"] = True
        if self.device == "cpu":
            arguments |= ON_CPU
        elif self.shares_gpus:
            arguments["enable_memory_saver"] = True
        # Arguments of the user take precedence over all others.
        return arguments | given

    def command(self, host: str, port: int, log_folder: Path) -> list[str]:
        log_folder.mkdir(parents=True, exist_ok=True)
        file = log_folder / f"{self.file_name}_arguments.json"
        file.write_text(json.dumps(self.arguments(host, port), indent=2) + "\n", encoding="utf-8")
        return [str(self.python), str(SERVE), str(file)]

    def environment(self) -> dict[str, str]:
        # Otherwise /health generates a token: it fails while generation is paused, and no cache can be flushed while it
        # runs. SGLang's watchdog ends a scheduler that hangs.
        env = {**foreign_environment(os.environ), "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if self.device == "cpu":
            # The threads of its processes compete for the cores: with two threads it is ten times slower.
            env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if self.api_key is not None:
            env[API_KEY_VARIABLE] = self.api_key
        return env
