"""Exceptions of rlscale.

Exception
├── ValueError
│   ├── ConfigError      the configuration is wrong; carries all problems found (exit code 2)
│   └── DataError        a data file is wrong; names the file and the row (exit code 2)
└── RuntimeError
    ├── WorkerError      a trainer rank or an engine failed; names it and carries the first cause
    ├── RewardError      a reward raised or returned no finite number; names the sample
    ├── HookError        another function of the user failed; names its key, file and line
    ├── EngineError      an engine rejected a request or did not respond
    ├── SandboxError     a sandbox could not start or ended; what a program does in it is a result
    ├── ServiceError     a service of the run (buffer.url) rejected a request or did not respond
    ├── WeightSyncError  weights on an engine differ from those of the trainer; names tensor or engine
    ├── FailureShareError  too many trajectories failed; carries the commonest cause
    ├── EmptyRolloutError  filters dropped every group for long
    ├── StalenessError   a sample is older than `rollout.max_staleness` allows; names the sample
    └── CheckError       an assertion of `ci.*` does not hold; names the assertion and the value found
"""

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a full quota."""


def show(value: Any) -> str:
    """A value as it is written in YAML."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def full_disk_advice(error: BaseException) -> str:
    """The end of the message of an error of a full disk; empty for another error."""
    if not isinstance(error, OSError) or error.errno not in FULL_DISK:
        return ""
    return "; free space on the disk and run the same command again: it resumes from the last checkpoint"


def count_noun(number: int, noun: str) -> str:
    """A number with its noun: `1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
    """The configuration cannot be run. `problems` holds all problems found, not only the first.

    `after_start` is true for problems that were found when processes of the run had already been started.
    """

    def __init__(self, problems: Sequence[Problem], *, after_start: bool = False) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems, self.after_start = tuple(problems), after_start
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]], dict[str, Any]]:
        return type(self), (self.problems,), {"after_start": self.after_start}


class DataError(ValueError):
    """A data file cannot be used; the message names the file and the 1-based row."""


class WorkerError(RuntimeError):
    """A trainer rank or an engine failed. `worker` names it, e.g. `actor rank 1`.

    `failed_at_s` is the wall-clock time of the failure (seconds since the epoch): of several failures the earliest is
    the cause. `died` is true for a lost process, which can be restarted, and false for an exception, which a restart
    would raise again.
    """

    def __init__(self, worker: str, cause: str, *, failed_at_s: float = 0.0, died: bool = False) -> None:
        self.worker, self.cause, self.failed_at_s, self.died = worker, cause, failed_at_s, died
        super().__init__(f"{worker}: {cause}")

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[str, str], dict[str, Any]]:
        return type(self), (self.worker, self.cause), {"failed_at_s": self.failed_at_s, "died": self.died}


class RewardError(RuntimeError):
    """A reward raised, or returned no finite number; the message names the sample.

    `__cause__`, if set, has the traceback of the user's code.
    """


class HookError(RuntimeError):
    """A user function between generation and training failed; the message names its key, file and line."""


_REFUSALS = frozenset({400, 413, 422})
"""Statuses of wrong requests. Others of the client's kind are about keys (401, 403), paths (404) or load (408, 429)."""


class EngineError(RuntimeError):
    """An engine rejected a request or could not be reached; the message names engine, endpoint and status.

    `status` is the HTTP status of a rejection and `reason` the server's own message; None: it did not answer.
    """

    def __init__(self, message: str, *, status: int | None = None, reason: str | None = None) -> None:
        self.status, self.reason = status, reason
        super().__init__(message)

    def __reduce__(self) -> tuple[type["EngineError"], tuple[str], dict[str, Any]]:
        return type(self), (str(self),), {"status": self.status, "reason": self.reason}

    @property
    def is_refusal(self) -> bool:
        """Whether the request itself is wrong, so that no engine would answer it."""
        return self.status in _REFUSALS


class RenderError(ValueError):
    """Messages that a chat template cannot render. The message names the message and the reason."""


class SandboxError(RuntimeError):
    """A sandbox could not start, ended or did not answer. A trajectory fails with the cause `sandbox`."""


class ServiceError(RuntimeError):
    """A service that the run uses rejected a request or could not be reached; the message names its key and URL."""


class WeightSyncError(RuntimeError):
    """The weights on an engine differ from those that the trainer sent; the message names the tensor or the engine."""


class FailureShareError(RuntimeError):
    """More trajectories failed than `sampling.max_failed_share` allows; the message has the commonest cause."""


class EmptyRolloutError(RuntimeError):
    """Filters or failures dropped so many groups in a row that a rollout cannot be completed."""


class StalenessError(RuntimeError):
    """A sample was generated by weights that are too old to train on; the message names the sample."""


class CheckError(RuntimeError):
    """An assertion of `ci.*` about a run does not hold; the message names it and the value found."""
