"""The few exceptions of rlscale.

Exception
├── ValueError
│   ├── ConfigError      the configuration is wrong; carries every problem found (exit code 2)
│   └── DataError        a data file is wrong; names the file and the row (exit code 2)
└── RuntimeError
    ├── WorkerError      a trainer rank or an engine failed; names it and carries the first cause
    ├── RewardError      a reward raised or gave no finite number; names the sample
    ├── EngineError      an engine refused or did not answer a request
    ├── WeightSyncError  weights on an engine are not those of the trainer; names tensor or engine
    ├── StalenessError   a sample is older than `rollout.max_staleness` allows; names it
    └── CheckError       something does not hold that `ci.*` asserts; says what
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mistake of a configuration: `<path> must <rule>, got <value>; <fix>`."""

    path: str
    rule: str
    value: str
    fix: str = ""
    origin: str = ""

    def __str__(self) -> str:
        text = f"{self.path} must {self.rule}, got {self.value}"
        text += f"; {self.fix}" if self.fix else ""
        return f"{text} ({self.origin})" if self.origin else text


class ConfigError(ValueError):
    """The configuration cannot be run. `problems` holds all that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class DataError(ValueError):
    """A data file cannot be used; the message names the file and the 1-based row."""


class WorkerError(RuntimeError):
    """A trainer rank or an engine failed. `worker` names it, e.g. `actor rank 1`.

    `failed_at_s` is the wall-clock time (seconds since the epoch) at which it failed, so that of several failures the
    first one, the cause, can be told from its victims. `died` tells a lost process, which may be started again, from an
    error, which would only be raised again.
    """

    def __init__(self, worker: str, cause: str, *, failed_at_s: float = 0.0, died: bool = False) -> None:
        self.worker, self.cause, self.failed_at_s, self.died = worker, cause, failed_at_s, died
        super().__init__(f"{worker}: {cause}")

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[str, str], dict[str, Any]]:
        return type(self), (self.worker, self.cause), {"failed_at_s": self.failed_at_s, "died": self.died}


class RewardError(RuntimeError):
    """A reward raised, or gave something that is no finite number; the message names the sample.

    Its cause, where there is one, carries the traceback of the user's code.
    """


class EngineError(RuntimeError):
    """An engine refused a request or could not be reached; the message names engine, endpoint and status."""


class WeightSyncError(RuntimeError):
    """An engine holds other weights than the trainer sent; the message names the tensor or the engine."""


class StalenessError(RuntimeError):
    """A sample is from weights that are too old to be trained on; the message names the sample."""


class CheckError(RuntimeError):
    """An assertion of `ci.*` about a run does not hold; the message says which, and what was found."""
