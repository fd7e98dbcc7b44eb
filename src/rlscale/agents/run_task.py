"""Values between the run and an agent: the task that it gets, and the result that it returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlscale.plugins.user_hook import is_finite, shown
from rlscale.protocols import SessionAccess
from rlscale.renderers.run_images import chat_messages
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause

GRADED_CAUSES = tuple(cause.value for cause in FailureCause if cause.is_graded)
"""Causes that an agent may name in its result: its attempt ended by the policy or by a limit, and is graded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTask:
    """A row of the prompts, as an agent gets it."""

    id: int  # of the trajectory
    row: int  # 0-based
    messages: list[dict[str, Any]]  # in the form of Chat Completions; images are data URLs
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the trajectory, for the agent's own random choices
    is_evaluation: bool = False

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, *, is_evaluation: bool = False) -> AgentTask:
        """The row of a trajectory. Raises OSError or ValueError if an image cannot be read any more."""
        prompt = trajectory.prompt
        return cls(
            id=trajectory.id,
            row=prompt.index,
            messages=chat_messages(prompt),
            label=prompt.label,
            metadata=dict(prompt.metadata),
            seed=trajectory.seed,
            is_evaluation=is_evaluation,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values, for an agent in another process."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSession:
    """The model of an agent: a URL, and a key that names the trajectory.

    Example:
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        answer = await client.chat.completions.create(model=session.model, messages=task.messages)
    """

    base_url: str  # for clients of OpenAI's APIs
    anthropic_url: str  # for clients of Anthropic's API
    api_key: str = field(repr=False)
    model: str = "policy"  # the gateway has only one

    @classmethod
    def from_access(cls, access: SessionAccess) -> AgentSession:
        return cls(base_url=access.base_url, anthropic_url=access.anthropic_url, api_key=access.api_key)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    """End of an agent that the run grades."""

    reward: float | None = None  # None: the run's reward grades the trajectory
    metadata: dict[str, Any] = field(default_factory=dict)  # of the trajectory; JSON values
    failure: Failure | None = None  # of a graded cause


class AgentFailed(Exception):
    """An agent ended without a result: the trajectory starts again, or has failed."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        self.cause, self.message = cause, message
        super().__init__(message)


def read_result(value: Any) -> AgentResult:
    """The result of an agent: None, a number, or a mapping of `reward`, `metadata`, `failure` and `message`.

    Raises:
        AgentFailed: it is none of these.
    """
    if value is None:
        return AgentResult()
    if not isinstance(value, Mapping):
        value = {"reward": value}
    if unknown := [str(each) for each in value if each not in ("reward", "metadata", "failure", "message")]:
        raise _wrong(f"have the keys reward, metadata, failure and message only, got {', '.join(unknown[:5])}")
    reward, cause = value.get("reward"), value.get("failure")
    if reward is not None and not is_finite(reward):
        raise _wrong(f"have a finite number as reward, got {shown(reward)}")
    if cause is not None and cause not in GRADED_CAUSES:
        raise _wrong(f"have a failure of {' or '.join(GRADED_CAUSES)}, got {shown(cause)}")
    message = str(value.get("message") or "the agent reported it")
    return AgentResult(
        reward=None if reward is None else float(reward),
        metadata=_json_object(value.get("metadata") or {}),
        failure=None if cause is None else Failure(cause=FailureCause(cause), message=message[:500]),
    )


def parse_result(content: bytes) -> AgentResult:
    """The result in a file or a response.

    Raises:
        AgentFailed: it is not JSON, or no result.
    """
    try:
        value = json.loads(content) if content.strip() else None
    except (ValueError, RecursionError) as error:
        raise _wrong(f"be JSON; {error}") from None
    return read_result(value)


def is_policy_error(error: BaseException, names: tuple[str, ...]) -> bool:
    """Whether an exception, or one of its base classes, has one of these names: `Name` or `module.Name`."""
    classes = type(error).__mro__
    return any(each.__name__ in names or f"{each.__module__}.{each.__qualname__}" in names for each in classes)


def _json_object(value: Any) -> dict[str, Any]:
    try:
        # Through JSON: a checkpoint writes it, and the agent may keep a reference to it.
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"have metadata of JSON values; {error}") from None
    if not isinstance(copied, dict):
        raise _wrong(f"have a mapping as metadata, got {shown(value)}")
    return copied


def _wrong(rule: str) -> AgentFailed:
    return AgentFailed(FailureCause.controller, f"its result must {rule}")
