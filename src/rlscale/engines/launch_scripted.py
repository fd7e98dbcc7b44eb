"""Starts the scripted engine in this interpreter."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlscale.engines.launch import API_KEY_VARIABLE, EngineLaunch, ProcessPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedLaunch(EngineLaunch):
    """The scripted engine: one process, no device."""

    script_path: str
    folder: str  # in which the script is found: the working directory of the driver, not of an actor

    def arguments(self, place: ProcessPlace) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "script": self.script_path,
            "folder": self.folder,
            "model_path": self.model_path,
            "host": place.host,
            "port": place.port,
        }
        return arguments if self.max_context_len is None else arguments | {"max_context_len": self.max_context_len}

    def command(self, place: ProcessPlace, log_folder: Path) -> list[str]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.arguments(place).items()]
        return [sys.executable, "-m", "rlscale.cli.serve_script", *flags]

    def variables(self, place: ProcessPlace) -> dict[str, str]:
        return {} if self.api_key is None else {API_KEY_VARIABLE: self.api_key}
