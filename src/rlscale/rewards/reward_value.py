"""Values that a reward returns: a finite number, or several by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeAlias

from rlscale.types import REWARD_WEIGHTS, REWARDS, Sample

RewardValue: TypeAlias = float | dict[str, Any]
"""A number, or numbers and texts by name."""

MAX_SHOWN = 80
"""Characters of a value in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingError:
    """Reason why a reward has no value: an exception of the user's code, a wrong value, a dead process."""

    cause: str  # one line, e.g. "ValueError: no such unit"
    place: str = ""  # in the user's code, e.g. "my_reward.py:3 in score"
    traceback: str = ""
    name: str = ""  # of the function of `reward.functions`; empty: the only reward

    def __str__(self) -> str:
        return f"{self.cause} ({self.place})" if self.place else self.cause


def check_value(value: Any) -> RewardValue:
    """Converts what a reward returned to JSON values.

    Raises:
        ValueError: it is neither a finite number nor a mapping. A named value may also be a text, or anything else as
            its text; `select_value` checks the one that is trained on.
    """
    if not isinstance(value, Mapping):
        return _number(value)
    return {str(name): _entry(entry) for name, entry in value.items()}


def check_values(value: Any, count: int) -> list[RewardValue | GradingError]:
    """Converts the list that a reward of whole groups returned; each wrong entry becomes one error.

    Raises:
        ValueError: it is no sequence of `count` entries.
    """
    entries = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) != count:
        number = f"{len(entries)} entries: " if hasattr(entries, "__len__") else ""
        found = number + show_value(value)
        raise ValueError(f"must be a list of {count} numbers, one for each sample of the group, got {found}")
    return [_value_or_error(entry) for entry in entries]


def name_values(name: str, value: RewardValue) -> dict[str, Any]:
    """The values of a function of `reward.functions` under the names of `reward.weights`: `name`, or `name/value`."""
    return {f"{name}/{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}


def find_wrong_value(values: Mapping[str, Any], needed: Sequence[str]) -> GradingError | None:
    """The error of a named value that is trained on and is missing or no finite number; None: there is none."""
    for name in needed:
        if name not in values:
            fix = "set reward.weights or reward.key to it"
            return GradingError(cause=f"must return a value {name!r}, got {', '.join(values) or 'none'}; {fix}")
        try:
            _number(values[name])
        except ValueError as error:
            return GradingError(cause=str(error))
    return None


def select_value(
    value: RewardValue, key: str | None, sample: Sample, *, weights: Mapping[str, float] = MappingProxyType({})
) -> float:
    """Returns the number to train on, and stores all numbers of a reward with several in the sample's metadata.

    Args:
        key: the number to use of a reward that returns several by name. None: the reward returns one number.
        weights: without a key, the weights of the numbers in a sum; stored in the metadata, too. Empty: no sum.

    Raises:
        ValueError: the value does not fit the key or the weights.
    """
    if key is None and weights:
        return _weighted_sum(value, weights, sample)
    if not isinstance(value, dict):
        if key is not None:
            raise ValueError(f"must be a mapping with reward.key={key}, got {value!r}; remove reward.key")
        return value
    names = ", ".join(value)
    if key is None:
        raise ValueError(f"must be a finite number, got a mapping; set reward.key to one of {names}")
    if key not in value:
        raise ValueError(f"must have an entry {key!r}, got {names}; set reward.key, or eval.reward_key")
    number = _number(value[key])
    sample.metadata[REWARDS] = dict(value)
    return number


def _weighted_sum(value: RewardValue, weights: Mapping[str, float], sample: Sample) -> float:
    if not isinstance(value, dict):
        raise ValueError(f"must be a mapping with reward.weights, got {value!r}; remove reward.weights")
    missing = [name for name in weights if name not in value]
    if missing:
        names = ", ".join(value) or "none"
        raise ValueError(f"must have an entry {missing[0]!r}, got {names}; correct reward.weights")
    numbers = {name: _number(value[name]) for name in weights}
    sample.metadata[REWARDS] = {**value, **numbers}
    sample.metadata[REWARD_WEIGHTS] = dict(weights)
    return _number(sum(weights[name] * number for name, number in numbers.items()))


def show_value(value: Any) -> str:
    """A value for a message; safe for values of user code whose text cannot be made."""
    try:
        text = repr(value)
    except Exception as error:  # repr is user code, and fails for an int of more than 4,300 digits
        return f"a value of type {type(value).__name__} without a text ({type(error).__name__})"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _value_or_error(value: Any) -> RewardValue | GradingError:
    try:
        return check_value(value)
    except ValueError as error:
        return GradingError(cause=str(error))


def _number(value: Any) -> float:
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int outside the range of floats, e.g. 10**400
        pass
    raise ValueError(f"must be a finite number, got {show_value(value)}; return a float from the reward")


def _entry(value: Any) -> Any:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    try:
        return float(value) if isinstance(value, Real) else show_value(value)
    except OverflowError:
        return show_value(value)
