"""Starts the embedded engine: `rlscale-serve` in this interpreter."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlscale.engines.launch import API_KEY_VARIABLE, EngineLaunch, ProcessPlace, device_variables


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedLaunch(EngineLaunch):
    """The embedded engine, started with `rlscale-serve`. It has one process and one rank."""

    num_slots: int
    deterministic: bool
    weight_precision: str | None = None  # of linear layers; None: dtype
    max_adapters: int | None = None  # versions of adapters, on a base that several jobs share; None: no limit

    def arguments(self, place: ProcessPlace) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "host": place.host,
            "port": place.port,
            "dtype": self.dtype,
            "device": self.device,
            "num_slots": self.num_slots,
            "num_threads": self.num_threads,
            "seed": self.seed,
            "deterministic": self.deterministic,
            "parent_death": True,
        }
        optional = {
            "max_context_len": self.max_context_len,
            "weight_precision": self.weight_precision,
            "max_adapters": self.max_adapters,
        }
        return arguments | {name: value for name, value in optional.items() if value is not None}

    def command(self, place: ProcessPlace, log_folder: Path) -> list[str]:
        flags = [_flag(name.replace("_", "-"), value) for name, value in self.arguments(place).items()]
        return [sys.executable, "-m", "rlscale.cli.serve", *flags]

    def variables(self, place: ProcessPlace) -> dict[str, str]:
        # Ray sets OMP_NUM_THREADS=1 for actors that claim no CPU; the server needs its configured number.
        variables = {"OMP_NUM_THREADS": str(self.num_threads)} | device_variables(place)
        return variables if self.api_key is None else variables | {API_KEY_VARIABLE: self.api_key}


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
