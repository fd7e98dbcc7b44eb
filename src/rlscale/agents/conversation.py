"""The conversation of one trajectory with the policy, within the budgets of the config."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlscale.errors import EngineError, RenderError
from rlscale.images import Image, collapse_placeholders
from rlscale.renderers.conversation_tree import ConversationTree, PreparedRequest
from rlscale.renderers.message_images import MessageImages, SampledPlaceholderError
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer, ToolSpec
from rlscale.rollout.generate_call import TrajectoryFailed
from rlscale.rollout.generate_session import ABORTED, FULL, GenerateSession
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

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "AgentCounts":
        """The inverse of `to_metadata`, of the metadata of a sample."""
        return cls(**metadata[AGENT])

    def to_metadata(self) -> dict[str, Any]:
        """The counts by name."""
        return {
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_rejected": self.tool_rejected,
            "tool_failed": self.tool_failed,
            **({"step_rewards": list(self.step_rewards)} if self.step_rewards else {}),
        }


def can_continue(trajectory: Trajectory) -> bool:
    """Whether the conversation of an aborted trajectory can be rebuilt: one path, whose turns have their messages."""
    turns = trajectory.turns
    is_path = all(turn.parent == (number - 1 if number else None) for number, turn in enumerate(turns))
    is_aborted = bool(turns) and turns[-1].sampled and trajectory.status == SampleStatus.aborted
    return is_aborted and is_path and all(turn.messages for turn in turns) and AGENT in trajectory.metadata


class AgentConversation:
    """Requests of one trajectory. Its messages are those of the request after the next answer.

    Args:
        trajectory: without turns, or an aborted one for `resume`.
        max_turns: answers of the policy.
        images: that messages name by hash. None: the messages are texts.

    Example:
        talk = AgentConversation(trajectory, session, renderer, tools=specs, max_turns=4)
        talk.add(*prompt.conversation)
        while (answer := await talk.answer()) is not None and answer.tool_calls:
            talk.add({"role": "tool", "content": "3"})
    """

    def __init__(
        self,
        trajectory: Trajectory,
        session: GenerateSession,
        renderer: Renderer,
        *,
        tools: Sequence[ToolSpec] = (),
        max_turns: int,
        images: MessageImages | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self.counts = AgentCounts()
        self._trajectory, self._session, self._tools = trajectory, session, tuple(tools)
        self._max_turns, self._images = max_turns, images
        self._tree, self._renderer = ConversationTree(trajectory, renderer, images=images), renderer
        self._begun: PreparedRequest | None = None  # whose answer, the last turn, an earlier rollout has begun
        self._num_before = trajectory.num_sampled  # tokens of earlier rollouts

    def resume(self) -> None:
        """Continues an aborted trajectory, see `can_continue`: the next answer is the rest of its last turn.

        The messages before its first turn have been added.
        """
        trajectory = self._trajectory
        if (own := trajectory.turns[0].prompt) is not None:
            trajectory.prompt, trajectory.turns[0].prompt = own, None
        self.know(trajectory.images())
        self.counts = AgentCounts.from_metadata(trajectory.metadata)
        self.counts.turns -= 1  # it is counted when it is complete
        self.messages, self._begun = self._tree.reopen(self.messages, self._tools)

    def know(self, images: Iterable[Image]) -> None:
        """Makes images known that messages name by hash."""
        if self._images is not None:
            self._images.add(images)

    def add(self, *messages: Message) -> None:
        """Adds messages that the next answer follows."""
        self.messages += messages

    async def answer(self) -> ParsedAnswer | None:
        """The next answer of the policy, which is then the last message; None: the rollout has ended.

        Raises:
            TrajectoryFailed: turns or tokens are used up (`budget`), the policy wrote placeholders of images
                (`policy`), or the messages cannot be rendered.
            EngineError: no engine answered.
        """
        if self.counts.turns >= self._max_turns:
            self._trajectory.status = SampleStatus.truncated
            raise failed(FailureCause.budget, f"agent.max_turns={self._max_turns} is used up")
        begun = self._begun
        request = begun or await self._prepare()
        if begun is None:
            generation = await self._generate(request.token_ids, self._tree.images_of(request))
        else:
            generation = await self._generate(self._trajectory.token_ids(), self._trajectory.images())
        if generation.finish_reason == "length" and not generation.output_ids and begun is None:
            self._trajectory.status = SampleStatus.truncated
            raise failed(FailureCause.budget, "the tokens of the trajectory are used up")
        if begun is None:
            answer = self._tree.add(request, generation)
        else:
            answer, self._begun = self._tree.add_remainder(begun, generation), None
        self.counts.turns += 1
        # A cut answer may contain half of a tool call: no tool is called.
        if generation.finish_reason == "abort":
            return None
        if generation.finish_reason == "length":
            raise failed(FailureCause.budget, "the tokens of the trajectory are used up")
        self.messages.append(answer.to_message())
        return answer

    async def _prepare(self) -> PreparedRequest:
        try:
            # In a thread: a long conversation takes milliseconds, in which the loop would answer no one.
            request = await asyncio.to_thread(self._tree.prepare, self.messages, self._tools)
        except SampledPlaceholderError as error:
            self._trajectory.status = SampleStatus.truncated
            raise failed(FailureCause.policy, str(error)) from error
        except RenderError as error:
            raise failed(FailureCause.controller, f"the messages cannot be rendered: {error}") from error
        # Later requests extend the first one, or have their own prompts in the tree.
        if not self._trajectory.turns:
            self._set_prompt(request)
        return request

    def _set_prompt(self, request: PreparedRequest) -> None:
        """Makes the first request the prompt of the trajectory: it has the tools, which the row's own may lack."""
        prompt, tokenizer = self._trajectory.prompt, self._session.tokenizer
        token_ids, images = request.token_ids, request.images if self._images is not None else prompt.images
        if prompt.token_ids == tuple(token_ids) and [i.digest for i in prompt.images] == [i.digest for i in images]:
            return
        # The text has one placeholder for each image.
        short = collapse_placeholders(token_ids, images)
        text = prompt.text if tokenizer is None else tokenizer.decode(short, skip_special_tokens=False)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        # The messages stay those of the row, also of one without a chat template.
        messages = prompt.conversation
        self._trajectory.prompt = replace(
            prompt, token_ids=tuple(token_ids), text=text, messages=messages, images=tuple(images)
        )

    async def _generate(self, token_ids: Sequence[int], images: Sequence[Image]) -> Generation:
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
            images=given.images if self._images is None else tuple(images),
        )
        round_tokens = self._session.round_tokens
        if round_tokens is not None:
            # All answers of a round share its tokens.
            round_tokens -= self._trajectory.num_sampled - self._num_before
            if round_tokens <= 0:
                return ABORTED
        # Open requests of an engine have different names.
        own = replace(self._session, rid=f"{self._session.rid}-{self.counts.turns}", round_tokens=round_tokens)
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
