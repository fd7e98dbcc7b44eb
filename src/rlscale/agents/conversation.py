"""The conversation of one trajectory with the policy, within the budgets of the config."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlscale.errors import EngineError, RenderError
from rlscale.renderers.conversation_tree import ConversationTree
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer, ToolSpec
from rlscale.rollout.generate_call import TrajectoryFailed
from rlscale.rollout.generate_session import FULL, GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import AGENT, Failure, FailureCause, Generation, SampleStatus


def failed(cause: FailureCause, message: str) -> TrajectoryFailed:
    """The end of an attempt at a trajectory with a failure."""
    return TrajectoryFailed(Failure(cause=cause, message=message))


@dataclass(kw_only=True, slots=True)
class AgentCounts:
    """Counts of one attempt; in the metadata of its samples under `agent`."""

    turns: int = 0  # answers of the policy
    tool_calls: int = 0
    tool_rejected: int = 0  # calls that were wrong: unknown tool, wrong arguments
    tool_failed: int = 0  # calls that failed, those that a further call repaired included
    step_rewards: list[float] = field(default_factory=list)  # of an environment

    def to_metadata(self) -> dict[str, Any]:
        """The counts by name."""
        return {
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_rejected": self.tool_rejected,
            "tool_failed": self.tool_failed,
            **({"step_rewards": list(self.step_rewards)} if self.step_rewards else {}),
        }


class AgentConversation:
    """Requests of one trajectory. Its messages are those of the request after the next answer.

    Args:
        trajectory: without turns.
        max_turns: answers of the policy.

    Example:
        talk = AgentConversation(trajectory, session, renderer, messages=prompt.conversation, tools=specs, max_turns=4)
        while (answer := await talk.answer()) is not None and answer.tool_calls:
            talk.add({"role": "tool", "content": "3"})
    """

    def __init__(
        self,
        trajectory: Trajectory,
        session: GenerateSession,
        renderer: Renderer,
        *,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        max_turns: int,
    ) -> None:
        self.messages: list[Message] = list(messages)
        self.counts = AgentCounts()
        self._trajectory, self._session, self._tools = trajectory, session, tuple(tools)
        self._max_turns = max_turns
        self._tree, self._renderer = ConversationTree(trajectory, renderer), renderer

    def add(self, *messages: Message) -> None:
        """Adds messages that the next answer follows."""
        self.messages += messages

    async def answer(self) -> ParsedAnswer | None:
        """The next answer of the policy, which is then the last message; None: the rollout has ended.

        Raises:
            TrajectoryFailed: turns or tokens are used up (`budget`), or the messages cannot be rendered.
            EngineError: no engine answered.
        """
        if self.counts.turns >= self._max_turns:
            self._trajectory.status = SampleStatus.truncated
            raise failed(FailureCause.budget, f"agent.max_turns={self._max_turns} is used up")
        try:
            # In a thread: a long conversation takes milliseconds, in which the loop would answer no one.
            request = await asyncio.to_thread(self._tree.prepare, self.messages, self._tools)
        except RenderError as error:
            raise failed(FailureCause.controller, f"the messages cannot be rendered: {error}") from error
        # Later requests extend the first one, or have their own prompts in the tree.
        if not self._trajectory.turns:
            self._set_prompt(request.token_ids)
        generation = await self._generate(request.token_ids)
        if generation.finish_reason == "length" and not generation.output_ids:
            self._trajectory.status = SampleStatus.truncated
            raise failed(FailureCause.budget, "the tokens of the trajectory are used up")
        answer = self._tree.add(request, generation)
        self.counts.turns += 1
        # A cut answer may contain half of a tool call: no tool is called.
        if generation.finish_reason == "abort":
            return None
        if generation.finish_reason == "length":
            raise failed(FailureCause.budget, "the tokens of the trajectory are used up")
        self.messages.append(answer.to_message())
        return answer

    def _set_prompt(self, token_ids: Sequence[int]) -> None:
        """Makes the first request the prompt of the trajectory: it has the tools, which the row's own may lack."""
        prompt, tokenizer = self._trajectory.prompt, self._session.tokenizer
        if prompt.token_ids == tuple(token_ids):
            return
        text = prompt.text if tokenizer is None else tokenizer.decode(list(token_ids), skip_special_tokens=False)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        self._trajectory.prompt = replace(prompt, token_ids=tuple(token_ids), text=text)

    async def _generate(self, token_ids: Sequence[int]) -> Generation:
        """One answer; all answers share the tokens of the trajectory."""
        given = self._session.params
        left = given.max_new_tokens - self._trajectory.num_sampled
        if left <= 0:
            return FULL
        params = replace(
            given,
            max_new_tokens=left,
            min_new_tokens=min(given.min_new_tokens, left),
            stop_token_ids=tuple(dict.fromkeys((*given.stop_token_ids, *self._renderer.stop_ids))),
        )
        # Open requests of an engine have different names.
        own = replace(self._session, rid=f"{self._session.rid}-{self.counts.turns}")
        return await own.generate(token_ids, params)


async def run_attempt(attempt: Awaitable[None], trajectory: Trajectory, *, timeout_s: float) -> Failure | None:
    """Runs one attempt at a trajectory; returns why it ended early, or None.

    Raises:
        WeightSyncError: a token was made by other weights.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await attempt
    except TrajectoryFailed as end:
        return replace(end.failure, message=f"{_where(trajectory)}: {end.failure.message}")
    except EngineError as error:
        return Failure(cause=FailureCause.model_server, message=str(error))
    except TimeoutError:
        if not deadline.expired():
            raise
        message = f"{_where(trajectory)} took longer than agent.timeout_s={timeout_s:g}"
        return Failure(cause=FailureCause.controller, message=message)
    return None


def keep_counts(trajectory: Trajectory, counts: AgentCounts) -> None:
    """Adds counts to the metadata of the samples."""
    trajectory.metadata[AGENT] = counts.to_metadata()


def _where(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.id} (prompt row {trajectory.prompt.index + 1})"
