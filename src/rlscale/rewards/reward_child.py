"""Process in which rewards run: loads the reward and scores the samples that the run sends.

Samples hold arrays and the user's metadata, of which only changes in JSON values get back to the run.
"""

import copy
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from rlscale.plugins.user_hook import is_coroutine_function
from rlscale.rewards.call_server import encode_error, serve_calls
from rlscale.rewards.code_place import describe_exception
from rlscale.rewards.judge_client import JudgeClient
from rlscale.rewards.load_reward import load_reward
from rlscale.rewards.reward_spec import RewardSpec
from rlscale.rewards.reward_value import GradingError, RewardValue, check_value, check_values
from rlscale.types import Sample


def main(channel: int, crash_file: int, parent: int) -> None:
    """Serves until the run closes the channel; see `serve_calls`."""
    serve_calls(channel, crash_file, parent, RewardCalls)


def load_spec(spec: RewardSpec, judge: JudgeClient | None = None) -> Callable[..., Any]:
    """Imports the reward with its wrapper."""
    reward: Callable[..., Any] = load_reward(
        spec.config, name=spec.name, custom=spec.custom, args=spec.args, judge=judge
    )
    if spec.wrapper is not None:
        module, _, name = spec.wrapper.partition(":")
        reward = getattr(importlib.import_module(module), name)(reward)
    return reward


class RewardCalls:
    """Calls of one reward; see `CallHandler`. Loads it."""

    def __init__(self, spec: RewardSpec) -> None:
        self._judge = None if spec.judge is None else JudgeClient(spec.judge)
        self._reward = load_spec(spec, self._judge)
        self._is_group, self.max_cpu_s = spec.config.group, spec.max_cpu_s
        self.is_async = is_coroutine_function(self._reward)

    def open(self, payload: list[Sample]) -> "_RewardCall":
        """A call with the samples of `payload`."""
        return _RewardCall(self._reward, payload, is_group=self._is_group)

    def receive(self, kind: str, *arguments: Any) -> None:
        """Replaces the addresses of engines; see `JudgeClient.set_addresses`."""
        assert kind == "engines", f"a reward must get addresses of engines only, got message {kind}"
        if self._judge is not None:
            self._judge.set_addresses(*arguments)

    async def finish(self) -> None:
        """Rewards hold nothing of an event loop."""

    def close(self) -> None:
        """Closes a reward with resources, such as a session."""
        close = getattr(self._reward, "close", None)
        if close is not None:
            close()


class _RewardCall:
    """One call: one sample, or with `reward.group` all samples of a group."""

    def __init__(self, reward: Callable[..., Any], samples: list[Sample], *, is_group: bool) -> None:
        self._reward, self._samples, self._is_group = reward, samples, is_group
        self._before = [copy.deepcopy(sample.metadata) for sample in samples]

    def run(self) -> Any:
        return self._reward(self._samples if self._is_group else self._samples[0])

    def reply(self, found: Any) -> dict[str, Any]:
        samples = self._samples
        values: Sequence[RewardValue | GradingError]
        try:
            if isinstance(found, GradingError):
                values = [found] * len(samples)
            else:
                values = check_values(found, len(samples)) if self._is_group else [check_value(found)]
        except Exception as error:  # the value is the user's: its methods may raise anything
            cause = str(error) if type(error) is ValueError else describe_exception(error)[0]
            values = [GradingError(cause=cause)] * len(samples)
        changes = [_changes(old, sample.metadata) for old, sample in zip(self._before, samples, strict=True)]
        return {"values": [_encode(value) for value in values], "metadata": changes}


def _encode(value: RewardValue | GradingError) -> dict[str, Any]:
    return encode_error(value) if isinstance(value, GradingError) else {"value": value}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Entries of a sample's metadata that the reward has set. Only JSON values reach the run."""
    changed = {}
    for name, value in after.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if isinstance(name, str) and (name not in before or json.dumps(before[name], default=repr) != text):
            changed[name] = value
    return changed
