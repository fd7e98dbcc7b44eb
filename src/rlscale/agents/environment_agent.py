"""Generates trajectories in which the policy acts in an environment."""

import time

from rlscale.agents.content_parts import NO_IMAGES, has_images
from rlscale.agents.conversation import AgentConversation, failed, keep_counts, run_attempt
from rlscale.agents.environment import Action, Task
from rlscale.agents.environment_log import EnvironmentLog, Episode
from rlscale.agents.environment_pool import EnvironmentFailed, EnvironmentLease, EnvironmentPool
from rlscale.config.groups.agent import AgentConfig, EnvironmentReward
from rlscale.images import Image
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer
from rlscale.renderers.run_images import RunImages, task_messages
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import CONVERSATIONS, FORKS, RESTARTED, Trajectory
from rlscale.types import AGENT, Failure, FailureCause

_RESERVED = (AGENT, FORKS, CONVERSATIONS, RESTARTED)
"""Entries of the metadata that an environment cannot set."""


class EnvironmentAgent:
    """Lets the policy act until its environment is done; see `group_generator.Generate`.

    The reward of the trajectory is that of its steps; without any, the reward of the config grades it.

    Args:
        log: of the episodes. None: they are not kept.
        images: of a run whose model reads images.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        renderer: Renderer,
        config: AgentConfig,
        *,
        log: EnvironmentLog | None = None,
        images: RunImages | None = None,
    ) -> None:
        self._pool, self._renderer, self._config, self._log = pool, renderer, config, log
        self._images = images

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """Returns why the attempt ended early: `budget`, `environment`, `model_server` or `controller`."""
        return await run_attempt(self._run(trajectory, session), trajectory, timeout_s=self._config.timeout_s)

    async def _run(self, trajectory: Trajectory, session: GenerateSession) -> None:
        if trajectory.turns:
            trajectory.restart_aborted()  # an environment cannot continue one
        prompt = trajectory.prompt
        task = Task(
            index=prompt.index,
            messages=prompt.conversation if self._images is None else task_messages(prompt),
            label=prompt.label,
            metadata=prompt.metadata,
            seed=trajectory.seed,
        )
        episode = Episode(trajectory=trajectory.id, task=task, is_evaluation=session.is_evaluation)
        try:
            async with self._pool.open() as environment:
                await self._play(environment, trajectory, session, episode)
        except EnvironmentFailed as error:
            episode.end = f"failed: {error}"
            raise failed(FailureCause.environment, f"the environment's {error}") from error
        finally:
            if self._log is not None:
                self._log.write(episode)

    async def _play(
        self, environment: EnvironmentLease, trajectory: Trajectory, session: GenerateSession, episode: Episode
    ) -> None:
        # The first messages are those of the environment: it decides which of the row it shows.
        start = await environment.reset(episode.task)
        messages, images = await self._open(start["messages"])
        episode.add_start({**start, "messages": messages}, images)
        talk = AgentConversation(
            trajectory,
            session,
            self._renderer,
            tools=start["tools"],
            max_turns=self._config.max_turns,
            images=None if self._images is None else self._images.of(trajectory.prompt),
        )
        talk.know(images)
        talk.add(*messages)
        try:
            while (answer := await talk.answer()) is not None:
                action, began_s = _as_action(answer), time.monotonic()
                result = await environment.step(action)
                seconds = time.monotonic() - began_s
                messages, images = await self._open(result["messages"])
                episode.add_step(action, {**result, "messages": messages}, seconds, images=images)
                talk.counts.tool_calls += len(answer.tool_calls)
                # Counts of rlscale stay what they are.
                own = {name: value for name, value in result["metadata"].items() if name not in _RESERVED}
                trajectory.metadata |= own
                if result["reward"] is not None:
                    talk.counts.step_rewards.append(result["reward"])
                if result["done"]:
                    episode.end = "done"
                    return
                talk.know(images)
                talk.add(*messages)
        finally:
            keep_counts(trajectory, talk.counts)
            # A trajectory whose tokens ran out has the rewards of its steps so far.
            trajectory.reward = self._reward(talk.counts.step_rewards)

    async def _open(self, messages: list[Message]) -> tuple[list[Message], list[Image]]:
        """Messages with their images opened. Raises EnvironmentFailed if the model cannot read one."""
        if not has_images(messages):
            return messages, []
        if self._images is None:
            raise EnvironmentFailed(f"messages cannot be used: {NO_IMAGES}")
        try:
            return await self._images.open_in_thread(messages)
        except ValueError as error:
            raise EnvironmentFailed(f"messages cannot be used: {' '.join(str(error).split())}") from error

    def _reward(self, rewards: list[float]) -> float | None:
        if not rewards:
            return None
        return sum(rewards) if self._config.environment_reward == EnvironmentReward.sum else rewards[-1]


def _as_action(answer: ParsedAnswer) -> Action:
    return Action(text=answer.content, reasoning=answer.reasoning, tool_calls=answer.tool_calls, error=answer.error)
