"""Requests of one trajectory, for the code that generates it."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlscale.config import RunConfig
from rlscale.protocols import SessionAccess
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.timeline import MIN_GAP_S, SpanKind, Timelines, Track, clock_s
from rlscale.types import Generation, SamplingParams, WeightVersion, fit_context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSession:
    """Engines with the weights of a trajectory, and the run's sampling parameters. Used from one event loop.

    Example:
        answer = await session.generate(trajectory.token_ids())
        trajectory.add_generation(answer)
    """

    params: SamplingParams  # of this trajectory: `sampling_seed` is its own
    rid: str  # of its requests
    pool: EnginePool
    versions: tuple[WeightVersion, WeightVersion | None]  # oldest and newest that engines may have
    config: RunConfig | None = None
    tokenizer: "PreTrainedTokenizerBase | None" = None
    is_evaluation: bool = False
    round_tokens: int | None = None  # of one answer; a longer one is returned as aborted
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # set at the end of the rollout
    track: Track | None = None  # timelines of the trajectories that requests are for; None: not recorded
    access: SessionAccess | None = None  # of the gateway, for an agent; None: there is no gateway

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """One answer to `token_ids`.

        Its finish reason is `abort` if the rollout ended before it, and `length`, without a token, if `token_ids` fill
        `rollout.max_context_len`.

        Raises:
            EngineError: the engine refused the request or could not be reached.
        """
        (answer,) = await self.generate_many(token_ids, n=1, params=params)
        return answer

    async def generate_many(
        self, token_ids: Sequence[int], *, n: int, params: SamplingParams | None = None
    ) -> list[Generation]:
        """`n` answers to `token_ids`; answer j uses the seed of the parameters + j."""
        began_s = clock_s()
        answers = await self._request(token_ids, n=n, params=params)
        interval_s = (began_s, clock_s())
        answers = [replace(each, interval_s=interval_s) for each in answers if each.engine != NO_ENGINE] or answers
        if self.track is not None and answers[0].engine != NO_ENGINE:
            sent_s, end_s = began_s + max(each.queued_s for each in answers), clock_s()
            if sent_s - began_s > MIN_GAP_S:
                self.track.add(SpanKind.queue, began_s, min(sent_s, end_s))
                began_s = min(sent_s, end_s)
            self.track.add(SpanKind.generate, began_s, end_s)
        return answers

    async def _request(self, token_ids: Sequence[int], *, n: int, params: SamplingParams | None) -> list[Generation]:
        if self.stopped.is_set():
            return [ABORTED] * n
        limit = (params or self.params).max_context_len
        if limit is not None and len(token_ids) >= limit:
            return [FULL] * n
        oldest, newest = self.versions
        fitting, limit = fit_context(params or self.params, len(token_ids)), self.round_tokens
        is_cut = limit is not None and fitting.max_new_tokens > limit
        if limit is not None and is_cut:
            fitting = replace(fitting, max_new_tokens=limit, min_new_tokens=min(fitting.min_new_tokens, limit))
        answers = await self.pool.generate(token_ids, fitting, n=n, rid=self.rid, oldest=oldest, newest=newest)
        eos_id = None if self.tokenizer is None else self.tokenizer.eos_token_id
        answers = [without_late_abort(each, fitting, eos_id=eos_id) for each in answers]
        if not is_cut:
            return answers
        return [replace(each, finish_reason="abort") if each.finish_reason == "length" else each for each in answers]

    @property
    def gateway(self) -> Any:
        """Client of the run's gateway, which opens sessions for agents that know a URL; None: the run has none."""
        return self.pool.gateway

    def continued(self, num_tokens: int) -> SamplingParams:
        """Parameters for the rest of an answer that was aborted after `num_tokens`."""
        return replace(
            self.params,
            max_new_tokens=max(1, self.params.max_new_tokens - num_tokens),
            min_new_tokens=max(0, self.params.min_new_tokens - num_tokens),
        )


NO_ENGINE = "none"
"""Engine of an answer that needed no request."""

ABORTED = Generation(output_ids=[], logprobs=[], weight_versions=[], finish_reason="abort", text="", engine=NO_ENGINE)
"""Answer to a request of a rollout that has ended."""

FULL = replace(ABORTED, finish_reason="length")
"""Answer to a request without room for a token: `rollout.max_context_len`, or the limit of a trajectory."""


def without_late_abort(answer: Generation, params: SamplingParams, *, eos_id: int | None = None) -> Generation:
    """The answer with its own finish reason if it was aborted at its last token: there is nothing to continue.

    SGLang applies an abort before it compares a new token with those that end an answer, and the length with its limit.

    Args:
        eos_id: a token that ends an answer in addition to `stop_token_ids`; None: there is no further one.
    """
    ids = answer.output_ids
    if answer.finish_reason != "abort" or not ids:
        return answer
    if not params.ignore_eos and ids[-1] in (*params.stop_token_ids, eos_id):
        return replace(answer, finish_reason="stop")
    return replace(answer, finish_reason="length") if len(ids) >= params.max_new_tokens else answer


TRAINING = "train"
"""Purpose of the requests of training rollouts; other purposes are evaluations."""


def group_seed(seed: int, purpose: str, index: int) -> int:
    """Seed of a group's first trajectory; the others count up from it. Depends on its arguments alone."""
    # Not hash(): Python salts the hash of a string differently in every process.
    digest = hashlib.blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31


def _rid_purpose(purpose: str) -> str:
    """The purpose in ids of requests, whose parts a dash ends: `eval-<set>` has two, so a set has no dash there."""
    kind, dash, name = purpose.partition("-")
    return kind + dash + name.replace("-", "_")


class SessionFactory:
    """Opens the sessions of groups, and ends their requests when a rollout is complete.

    Args:
        params: `sampling_seed` is the run's seed, from which every group derives its own.
        purpose: of the requests, a part of their ids and seeds; the index of a group is unique within it.
        timelines: of the trajectories that these requests are for. None: they are not recorded.
    """

    def __init__(
        self,
        pool: EnginePool,
        params: SamplingParams,
        *,
        purpose: str = TRAINING,
        config: RunConfig | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        timelines: Timelines | None = None,
    ) -> None:
        self.timelines = timelines or Timelines()
        self._pool, self._params, self._config, self._tokenizer = pool, params, config, tokenizer
        self._purpose = purpose
        self.num_samples = 1 if config is None else config.batch.n_samples_per_prompt
        self._open: dict[int, GenerateSession] = {}

    def group_seed(self, index: int) -> int:
        """Seed of the first trajectory of a group; the others count up from it."""
        return group_seed(self._params.sampling_seed or 0, self._purpose, index)

    def open(self, index: int, versions: tuple[WeightVersion, WeightVersion | None]) -> GenerateSession:
        """The session of a group, until `close`."""
        session = GenerateSession(
            params=replace(self._params, sampling_seed=self.group_seed(index)),
            rid=f"{_rid_purpose(self._purpose)}-{index}",
            pool=self._pool,
            versions=versions,
            config=self._config,
            tokenizer=self._tokenizer,
            is_evaluation=self._purpose != TRAINING,
        )
        self._open[index] = session
        return session

    def close(self, index: int) -> None:
        """Forgets the session of a group that is finished."""
        self._open.pop(index, None)

    async def stop(self, indices: Sequence[int]) -> None:
        """Aborts the running requests of these groups; their later requests are answered with an abort at once."""
        rids = []
        for index in indices:
            if index in self._open:
                self._open[index].stopped.set()
                rids.append(self._open[index].rid)
        await self._pool.abort_requests(rids)
