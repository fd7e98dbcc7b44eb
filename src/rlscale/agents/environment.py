"""Environments: the world in which the policy acts, turn by turn.

task ──> reset ──> messages ──> policy ──> action ──> step ──> messages, reward, done
                       ^                                          │
                       └──────────────────────────────────────────┘
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rlscale.renderers.renderer import Message, ToolCall, ToolSpec

Messages: TypeAlias = str | Message | Sequence[Message]
"""Messages of an environment; a text is one message of the user. In a run with images a content may be a list of texts,
PIL images and parts `{"type": "image", "image": <PIL image, bytes, path or data URL>}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A row of the prompts, for which an environment is reset.

    Example:
        Task(index=3, messages=({"role": "user", "content": "guess"},), label="7", seed=12)
    """

    index: int  # 0-based row of the prompt source
    messages: tuple[dict[str, Any], ...]  # of the row; its images are parts with their path or data URL
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)  # of the row
    seed: int = 0  # of the trajectory; another one for each trajectory of a group


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One answer of the policy."""

    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None  # why a tool call could not be read; its text is in `text`


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The start of an episode."""

    messages: Messages
    tools: tuple[ToolSpec, ...] = ()  # that the policy may call; `step` gets the calls


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one action.

    Example:
        StepResult(messages="too high", reward=0.0)
        StepResult(reward=1.0, done=True)
    """

    messages: Messages = ()  # that the policy sees; needed unless `done`
    reward: float | None = None  # None: this step has none
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON values, for the metadata of the sample


class Environment(Protocol):
    """`agent.environment_path`: one object for each trajectory. Methods are coroutines or plain functions.

    A method may raise: the trajectory has failed (`environment`), and starts again with a fresh object. `close()`, if
    there is one, is called once for each object, whatever happened.
    """

    def reset(self, task: Task, /) -> Observation | Messages | Awaitable[Observation | Messages]:
        """Starts an episode. Returns the messages that the policy sees first."""
        ...

    def step(self, action: Action, /) -> StepResult | Awaitable[StepResult]:
        """Takes an answer of the policy."""
        ...


def as_messages(given: Messages) -> list[Message]:
    """The messages of an environment; a text is one message of the user.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found = [given] if isinstance(given, Mapping) else list(given)
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages must be a text, or mappings with role and content, got {message!r:.80}")
    return found
