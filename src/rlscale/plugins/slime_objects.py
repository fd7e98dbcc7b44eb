"""Small classes and functions that functions written for slime import from it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from rlscale.plugins.sample_view import DocumentSample

Result = TypeVar("Result")


@dataclass
class DynamicFilterOutput:
    """Verdict of a dynamic filter."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


@dataclass
class RolloutFnTrainOutput:
    """Result of a rollout function: groups of samples."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of an eval function: rewards, truncated and samples of each set by its name."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class SingletonMeta(type):
    """Metaclass of classes with one instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in _INSTANCES:
            _INSTANCES[cls] = super().__call__(*args, **kwargs)
        return _INSTANCES[cls]


_INSTANCES: dict[type, Any] = {}


@cache
def load_function(path: str) -> Any:
    """The object `package.module.name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end from plain code, also where an event loop runs in this thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


def check_reward_nonzero_std(args: Any, samples: Sequence[DocumentSample], **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = max(rewards) > min(rewards)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")
