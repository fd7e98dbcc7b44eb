"""Admission of trajectories with several turns: their cache stays on the engines while they wait for tools."""

from dataclasses import replace

from rlscale.agents.run_admission import AgentAdmission
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.group_generator import Generate
from rlscale.rollout.timeline import MIN_GAP_S, SpanKind, clock_s
from rlscale.trajectory import Trajectory
from rlscale.types import Failure


class AdmittedAgent:
    """Generates trajectories as another one does, as many at once as fit the KV cache of the engines.

    A trajectory that waits is in the queue, as one whose request waits for an engine: `trajectory/queue_s_mean`.

    Args:
        max_context_len: of the model; without `rollout.max_context_len` it limits a conversation. None: no limit.
    """

    def __init__(self, generate: Generate, admission: AgentAdmission, *, max_context_len: int | None = None) -> None:
        self._generate, self._admission, self._max_context_len = generate, admission, max_context_len

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """See `group_generator.Generate`."""
        if session.params.max_context_len is None:
            # Results of tools make a conversation longer than prompt and response, which the data checks.
            session = replace(session, params=replace(session.params, max_context_len=self._max_context_len))
        began_s = clock_s()
        async with self._admission.admit() as admitted:
            if session.track is not None and clock_s() - began_s > MIN_GAP_S:
                session.track.add(SpanKind.queue, began_s, clock_s())
            failure = await self._generate(trajectory, session)
            admitted.note_end(trajectory, failure)
            return failure
