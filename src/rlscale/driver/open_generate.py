"""The ways in which a run generates trajectories: an agent, and functions of the user, each with its processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlscale.config.groups.sampling import GenerateIsolation
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import ConfigError, Problem
from rlscale.plugins.args_view import Args
from rlscale.plugins.load_plugin import load_plugin
from rlscale.rewards.call_pool import PoolLimits
from rlscale.rollout.generate_process import ProcessGenerate
from rlscale.rollout.generate_values import ISOLATION, GenerateSpec
from rlscale.rollout.group_generator import Generate
from rlscale.rollout.user_generate import UserGenerate

KEY = "sampling.custom_generate_function_path"
MAX_SUSPECT_WORKERS = 4
"""Processes for trajectories that were in a lost one."""


class Generators:
    """The generate functions of a run by their path: training and the evaluation sets share those of equal paths.

    Args:
        agent: generates where no function does; None: one request.
    """

    def __init__(self, prepared: PreparedRun, *, agent: Generate | None = None) -> None:
        self._prepared, self._agent = prepared, agent
        self._functions: dict[str, UserGenerate | ProcessGenerate] = {}

    def find(self, path: str | None = None) -> Generate | None:
        """The generate function of an evaluation set, or of the run; the agent; None: there is none.

        Args:
            path: of the set alone.

        Raises:
            ConfigError: the function cannot be imported.
        """
        path = path or self._prepared.config.sampling.custom_generate_function_path
        if path is None:
            return self._agent
        if path not in self._functions:
            self._functions[path] = self._open(path)
        return self._functions[path]

    def close(self) -> None:
        """Ends the processes of the functions."""
        for function in self._functions.values():
            if isinstance(function, ProcessGenerate):
                function.close()

    def _open(self, path: str) -> UserGenerate | ProcessGenerate:
        prepared, config = self._prepared, self._prepared.config
        args, sampling = Args(config, runtime={"hf_checkpoint": prepared.model_path}), config.sampling
        if sampling.generate_isolation == GenerateIsolation.thread:
            function = load_plugin(KEY, path, args=args, custom=config.custom)
            return UserGenerate(function, timeout_s=sampling.generate_timeout_s, max_turns=sampling.generate_max_turns)
        spec = GenerateSpec(
            path=path, args=args, custom=config.custom, config=config, tokenizer=_pickled(prepared.tokenizer)
        )
        limits = PoolLimits(
            max_async_workers=sampling.generate_processes,
            max_suspect_workers=MAX_SUSPECT_WORKERS,
            timeout_s=sampling.generate_timeout_s,
        )
        return ProcessGenerate(spec, limits, max_turns=sampling.generate_max_turns)


@contextmanager
def open_generate(prepared: PreparedRun, agent: Generate | None) -> Iterator[Generators]:
    """The generators of a run; their processes end with the body."""
    generators = Generators(prepared, agent=agent)
    try:
        yield generators
    finally:
        generators.close()


def _pickled(tokenizer: Any) -> bytes | None:
    if tokenizer is None:
        return None
    try:
        return pickle.dumps(tokenizer)
    except Exception as error:  # a tokenizer may have Python code, which may raise anything
        rule, fix = "be thread with this tokenizer", f"it cannot be sent to another process: {error}"
        raise ConfigError([Problem(path=ISOLATION, rule=rule, value="process", fix=fix)]) from error
