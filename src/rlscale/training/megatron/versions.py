"""Versions of Megatron-core that run without CUDA. Imports neither torch nor Megatron-core."""

from __future__ import annotations

from rlscale.errors import ConfigError, Problem

CPU_VERSION = "0.16."
"""Supported version of Megatron-core. Its micro releases have the same code in the places patched for the CPU."""


def check_version(version: str) -> None:
    """Raises ConfigError for a version of Megatron-core that the patches do not support."""
    if not version.startswith(CPU_VERSION):
        raise ConfigError([version_problem(version)])


def version_problem(version: str) -> Problem:
    """The problem of an unsupported version."""
    rule, value = f"have megatron-core {CPU_VERSION}x to run without CUDA", f"megatron with megatron-core {version}"
    fix = "pip install 'rlscale[megatron]', or choose train=fsdp"
    return Problem(path="train.backend", rule=rule, value=value, fix=fix)
