"""Generates trajectories in which the policy calls tools.

messages of the row ──> engine ──> answer ── without calls ──> end
             ^                       └── calls ──> tools, at the same time ──> tool messages ──┐
             └─────────────────────────────────────────────────────────────────────────────────┘
"""

import asyncio
from collections.abc import Sequence

from rlscale.agents.conversation import AgentConversation, can_continue, failed, keep_counts, run_attempt
from rlscale.agents.tool_pool import Owner, ToolBox, ToolResult
from rlscale.config.groups.agent import AgentConfig
from rlscale.images import Image
from rlscale.renderers.message_images import prompt_messages
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer
from rlscale.renderers.run_images import RunImages
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import CONTINUED, Trajectory
from rlscale.types import Failure


class ToolAgent:
    """Lets the policy call tools until it answers without a call; see `group_generator.Generate`.

    A trajectory that an earlier rollout aborted continues with its turns. It begins again if one of its tools has kept
    a state for it. A wrong call is a result that names the error. A tool that failed is handled as
    `agent.on_tool_error` says.
    """

    def __init__(
        self, box: ToolBox, renderer: Renderer, config: AgentConfig, *, images: RunImages | None = None
    ) -> None:
        """Args:
        images: of a run whose model reads images.
        """
        self._box, self._renderer, self._config, self._images = box, renderer, config, images

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """Returns why the attempt ended early: `budget`, `tool`, `model_server` or `controller`."""
        return await run_attempt(self._run(trajectory, session), trajectory, timeout_s=self._config.timeout_s)

    async def _run(self, trajectory: Trajectory, session: GenerateSession) -> None:
        is_continued = can_continue(trajectory) and not self._has_lost_state(trajectory)
        if trajectory.turns and not is_continued:
            trajectory.restart_aborted()
        talk = AgentConversation(
            trajectory,
            session,
            self._renderer,
            images=None if self._images is None else self._images.of(trajectory.prompt),
            tools=self._box.specs,
            max_turns=self._config.max_turns,
        )
        row_images = trajectory.prompt.images
        talk.add(*prompt_messages(trajectory.prompt))
        if is_continued:
            trajectory.metadata[CONTINUED] = trajectory.metadata.get(CONTINUED, 0) + 1
            talk.resume()
        try:
            while (answer := await talk.answer()) is not None:
                messages = await self._results(answer, talk, row_images)
                if not messages:
                    return
                talk.add(*messages)
        finally:
            keep_counts(trajectory, talk.counts)
            await self._box.release(talk)

    def _has_lost_state(self, trajectory: Trajectory) -> bool:
        """Whether the aborted attempt called a tool that kept something for it, e.g. the files of its sandbox."""
        messages = (message for turn in trajectory.turns[:-1] if turn.sampled for message in turn.messages)
        calls = (call for message in messages for call in message.get("tool_calls", ()))
        return any(self._box.keeps_state(call["function"]["name"]) for call in calls)

    async def _results(
        self, answer: ParsedAnswer, talk: AgentConversation, row_images: Sequence[Image]
    ) -> list[Message]:
        """The messages that follow an answer; none: it is the last one."""
        if not answer.tool_calls:
            if answer.error is None:
                return []
            talk.counts.tool_calls += 1
            talk.counts.tool_rejected += 1
            # No tool message: there is no call that it could answer.
            return [{"role": "user", "content": f"Error: the tool call cannot be read: {answer.error}"}]
        calls = answer.to_message()["tool_calls"]
        named = [(call.name, call.arguments) for call in answer.tool_calls]
        results = await call_all(self._box, named, owner=talk, images=row_images)
        talk.counts.tool_calls += len(results)
        talk.counts.tool_rejected += sum(result.is_rejected for result in results)
        talk.counts.tool_failed += sum(result.error is not None or result.num_calls > 1 for result in results)
        # After all of them have ended: none is left running in the next attempt.
        for call, result in zip(answer.tool_calls, results, strict=True):
            if result.error is not None and self._box.fails_trajectories:
                message = f"tool {call.name} failed ({result.num_calls} calls): {result.error}"
                raise failed(result.cause, message)
        talk.know(image for result in results for image in result.images)
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result.content}
            for call, result in zip(calls, results, strict=True)
        ]


async def call_all(
    box: ToolBox, calls: Sequence[tuple[str, str]], *, owner: Owner, images: Sequence[Image] = ()
) -> list[ToolResult]:
    """The results of calls that run at the same time; none is left running.

    Args:
        images: of the row.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(box.call(name, arguments, owner, images=images)) for name, arguments in calls]
    return [task.result() for task in tasks]
