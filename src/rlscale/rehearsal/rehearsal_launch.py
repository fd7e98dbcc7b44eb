"""Launches of a rehearsal: each process of an engine is planned and recorded as the real run starts it, and served by
a process that needs no GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlscale.engines.launch import API_KEY_VARIABLE, EngineLaunch, ProcessPlace
from rlscale.secrets import redact

RECORD_SUFFIX = "_launch.json"
"""End of the names of the files in the log folder that record command, arguments and variables of a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalLaunch(EngineLaunch):
    """Records the launch of `real`, and starts the command of `served`, or the scripted engine.

    Args:
        real: launch of the real run, on GPUs.
        served: the embedded engine with the tiny model. None: the embedded engine does not run this family.
    """

    real: EngineLaunch
    served: EngineLaunch | None

    @property
    def needs_rendezvous(self) -> bool:
        return self.real.needs_rendezvous

    @property
    def needs_bootstrap_port(self) -> bool:
        return self.real.needs_bootstrap_port

    def for_engine(self, number: int) -> EngineLaunch:
        return replace(self, real=self.real.for_engine(number))

    def arguments(self, place: ProcessPlace) -> dict[str, Any]:
        return self._named(self.real).arguments(place)

    def command(self, place: ProcessPlace, log_folder: Path) -> list[str]:
        self._record(place, log_folder)
        if self.served is not None and place.node_rank == 0:
            return self._named(self.served).command(place, log_folder)
        return [sys.executable, "-m", "rlscale.rehearsal.fake_server", self.model_path, place.host, str(place.port)]

    def variables(self, place: ProcessPlace) -> dict[str, str]:
        if self.served is not None:
            # Without the GPUs of the place: the process that serves runs on the CPU.
            return self._named(self.served).variables(replace(place, gpus=()))
        variables = {"OMP_NUM_THREADS": str(self.num_threads)}
        return variables if self.api_key is None else variables | {API_KEY_VARIABLE: self.api_key}

    def _named(self, launch: EngineLaunch) -> EngineLaunch:
        return replace(launch, name=self.name, api_key=self.api_key)

    def _record(self, place: ProcessPlace, log_folder: Path) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        file = log_folder / f"{self.file_name}{RECORD_SUFFIX}"
        file.write_text(json.dumps(describe_process(self._named(self.real), place), indent=2) + "\n", encoding="utf-8")


def describe_process(launch: EngineLaunch, place: ProcessPlace) -> dict[str, Any]:
    """Name, arguments and variables of a process of the real run, without its API key."""
    record: dict[str, Any] = redact(
        {
            "name": launch.name,
            "host": place.host,
            "node_rank": place.node_rank,
            "arguments": launch.arguments(place),
            "variables": {k: v for k, v in launch.variables(place).items() if k != API_KEY_VARIABLE},
        }
    )
    return record
