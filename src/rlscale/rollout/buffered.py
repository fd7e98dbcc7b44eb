"""Source of rollouts that other processes generate and submit to the rollout buffer: `buffer.url`.

    service ── log of the run: position 0, 1, 2, ... ──> places ── checks ──> groups of the run

A group of the run is a place in it: `draw` opens places, and each gets the next group of the log that may be trained
on. The state has the position in the log and, for each place without an outcome, the position of its group: a run that
resumes reads those again, in the same order. So every group of the log is trained on once, or has another outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from math import ceil
from typing import Any, Protocol

import numpy as np

from rlscale.config import RunConfig
from rlscale.config.groups.algo import uses_critic
from rlscale.protocols import CollectSettings
from rlscale.rollout.group_age import oldest_version
from rlscale.rollout.group_filters import TOO_FEW, GroupFilters
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus, WeightVersion

log = logging.getLogger(__name__)

Json = Mapping[str, Any]


class GroupReader(Protocol):
    """Reads the log of groups that the service delivers to this run."""

    async def next_groups(self, *, position: int, number: int) -> Sequence[Json]:
        """At least one and at most `number` groups from `position` on; waits until there is one."""
        ...

    async def groups_at(self, positions: Sequence[int]) -> Sequence[Json]:
        """The groups at positions that were read before."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryLimits:
    """Limits of the model for trajectories of other processes. None: unknown, or none."""

    vocab_size: int | None = None
    max_tokens: int | None = None  # of prompt and response


class BufferedRollouts:
    """Rollouts of the buffer service.

    Args:
        reader: calls the service.
        limits: a trajectory beyond them fails.

    Example:
        source = BufferedRollouts(client, config, limits=TrajectoryLimits(vocab_size=512))
        (index, prompt), *_ = await source.draw(0, 4)
        group = await source.group(index, prompt, oldest=0, newest=0)
    """

    has_rewards = True
    max_lag = 0

    def __init__(
        self,
        reader: GroupReader,
        config: RunConfig,
        *,
        limits: TrajectoryLimits = TrajectoryLimits(),
        filters: GroupFilters | None = None,
    ) -> None:
        batch, sampling = config.batch, config.sampling
        self._reader, self._limits, self._filters = reader, limits, filters or GroupFilters()
        self._num_samples = batch.n_samples_per_prompt
        self._min_samples = min(sampling.min_group_size, self._num_samples)
        # The oldest weights of rollout r are those of version r - lag.
        num_critic_only = config.critic.num_critic_only_steps if uses_critic(config.algo) else 0
        self._lag = config.rollout.max_staleness + num_critic_only
        number = batch.rollout_batch_size
        self.settings = CollectSettings(
            num_groups=ceil(config.buffer.min_batch_collection_ratio * number),
            max_groups=number,
            wave=number,
            takes_first_finished=True,
            is_filled=self._filters.fills_rollouts,
            keeps_dropped=sampling.all_samples_process_path is not None,
        )
        self._next_index = 0  # of the next place
        self._rollouts: dict[int, int] = {}  # of places without an outcome
        self._chosen: list[int] = []  # places of the buffer for the rollout that draws
        self._position = 0  # of the next group of the log that has no place
        self._positions: dict[int, int] = {}  # of the groups of places without an outcome
        self._returned: set[int] = set()  # places whose group at that position was returned
        self._ready: deque[Json] = deque()  # read, without a place: position, position + 1, ...
        self._waiting: dict[int, asyncio.Future[Json | None]] = {}  # places, in the order of their calls
        self._reading: asyncio.Task[None] | None = None

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """The next places; the prompt is known when a group has arrived."""
        number = self.settings.wave if number is None else number
        first, self._next_index = self._next_index, self._next_index + number
        self._rollouts |= dict.fromkeys((*self._chosen, *range(first, first + number)), rollout_id)
        self._chosen = []
        return [(index, Prompt(index=index, text="", token_ids=(0,))) for index in range(first, first + number)]

    async def draw(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """See RolloutSource."""
        return self.next_prompts(rollout_id, number)

    def trajectory_ids(self, index: int) -> Sequence[int]:
        """The ids of a place's trajectories, which count over the run."""
        return range(index * self._num_samples, (index + 1) * self._num_samples)

    async def group(
        self,
        index: int,
        prompt: Prompt,
        *,
        oldest: WeightVersion,
        newest: WeightVersion | None,
        before: Group | None = None,
    ) -> Group:
        """The next group that may be trained on, or one without samples after `stop`.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        if index in self._returned:
            self._forget(index)  # it was too old for its rollout
        while True:
            record = await self._next_record(index)
            if record is None:
                return Group(index=index, prompt=prompt, samples=[])
            self._positions[index] = record["position"]
            group = self._build_group(index, record)
            reason = self._wrong_version(group, oldest)
            if reason is None:
                self._returned.add(index)
                return group
            log.info("group %r of the buffer service is dropped: %s", record["name"], reason)
            self._forget(index)

    def reason_to_drop(self, group: Group) -> str | Awaitable[str | None] | None:
        """`min_group_size`, or the reason of the dynamic filter."""
        if len(group.samples) < self._min_samples:
            self._close(group.index)
            return TOO_FEW
        reason = self._filters.reason_to_drop(group)
        return self._judge_later(group, reason) if isawaitable(reason) else self._noted(group, reason)

    async def choose_buffered(self, groups: Sequence[Group], number: int) -> list[int]:
        """The first places that are open since an earlier rollout."""
        self._chosen = sorted(group.index for group in groups)[:number]
        return list(self._chosen)

    def observe_dropped(self, group: Group, *, rollout_id: int) -> None:
        """Does nothing: the service chooses the prompts."""

    def observe(self, groups: Sequence[Group], *, rollout_id: int) -> None:
        """Forgets the positions of groups that were trained on."""
        for group in groups:
            self._close(group.index)

    async def stop(self, indices: Sequence[int]) -> None:
        """Ends the wait of places without a group."""
        for index in indices:
            if (waiting := self._waiting.pop(index, None)) is not None and not waiting.done():
                waiting.set_result(None)
        self._end_if_idle()

    def state_dict(self) -> dict[str, Any]:
        positions = {str(index): position for index, position in self._positions.items()}
        return {"next_index": self._next_index, "position": self._position, "positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next_index, self._position = state["next_index"], state["position"]
        self._positions = {int(index): position for index, position in state["positions"].items()}
        self._returned.clear()
        self._ready.clear()

    def _forget(self, index: int) -> None:
        self._positions.pop(index, None)
        self._returned.discard(index)

    def _close(self, index: int) -> None:
        """Forgets a place, whose group has an outcome."""
        self._forget(index)
        self._rollouts.pop(index, None)

    async def _judge_later(self, group: Group, reason: Awaitable[str | None]) -> str | None:
        return self._noted(group, await reason)

    def _noted(self, group: Group, reason: str | None) -> str | None:
        if reason is not None:
            self._close(group.index)
        return reason

    async def _next_record(self, index: int) -> Json | None:
        """The group that the place had in the checkpoint, else the next one of the log; None after `stop`."""
        if (position := self._positions.get(index)) is not None:
            (again,) = await self._reader.groups_at([position])
            return again
        if not self._ready:
            future: asyncio.Future[Json | None] = asyncio.get_running_loop().create_future()
            self._waiting[index] = future
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            try:
                return await future
            finally:
                self._waiting.pop(index, None)
                self._end_if_idle()
        return self._take_ready(index)

    def _take_ready(self, index: int) -> Json:
        """Gives the next group to a place. Its position is noted in the same moment: see `state_dict`."""
        record = self._ready.popleft()
        self._positions[index] = record["position"]
        self._position = record["position"] + 1
        return record

    async def _read(self) -> None:
        """Reads groups as long as places wait for them."""
        try:
            while self._waiting:
                first = self._ready[-1]["position"] + 1 if self._ready else self._position
                self._ready.extend(await self._reader.next_groups(position=first, number=len(self._waiting)))
                waiting = [(index, future) for index, future in self._waiting.items() if not future.done()]
                for index, future in waiting[: len(self._ready)]:
                    del self._waiting[index]
                    future.set_result(self._take_ready(index))
        except Exception as error:  # each place raises it
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            # One that was cancelled ends late: a place may have started the next one.
            if self._reading is asyncio.current_task():
                self._reading = None

    def _end_if_idle(self) -> None:
        # Groups of an answer that is lost with the request are delivered again.
        if not self._waiting and self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
            self._reading = None

    def _wrong_version(self, group: Group, current: WeightVersion) -> str | None:
        """The reason why the rollout of a place must not train on a group; None: it may."""
        rollout_id = self._rollouts[group.index]
        # Without a trainer the version stays below the number of the rollout.
        first, last = min(rollout_id - self._lag, current), max(rollout_id, current)
        for sample in group.samples:
            version, newest = oldest_version(sample), int(sample.weight_versions.max())
            if version is not None and version < first:
                return f"sample {sample.index} has a token of weight version {version}, older than {first}"
            if newest > last:
                return f"sample {sample.index} has a token of weight version {newest}, which does not exist yet"
        return None

    def _build_group(self, index: int, record: Json) -> Group:
        trajectories: Sequence[Json] = record["trajectories"]
        ids = self.trajectory_ids(index)
        prompt = _build_prompt(index, trajectories[0]["prompt"])
        group = Group(index=index, prompt=prompt, samples=[])
        for number, each in zip(ids, trajectories, strict=True):
            sample = self._build_sample(number, group, each)
            sample.metadata["buffer"] = {"id": each["id"], "group": record["name"], "position": record["position"]}
            (group.failed if sample.status == SampleStatus.failed else group.samples).append(sample)
        return group

    def _build_sample(self, number: int, group: Group, record: Json) -> Sample:
        prompt = _build_prompt(group.index, record["prompt"])
        sample = Sample(
            index=number,
            group_index=group.index,
            # One object for the whole group, unless the producer changed the prompt of a trajectory.
            prompt=group.prompt if prompt == group.prompt else prompt,
            seed=number,
            response=record.get("response", ""),
            reward=record.get("reward"),
            status=SampleStatus(record.get("status", "completed")),
            metadata=dict(record.get("metadata", {})),
        )
        failure = record.get("failure")
        if failure is not None:
            sample.failure = Failure(cause=FailureCause(failure["cause"]), message=failure["message"])
        elif (message := self._find_misfit(record)) is not None:
            sample.status, sample.reward = SampleStatus.failed, None
            sample.failure = Failure(cause=FailureCause.controller, message=message)
        if sample.failure is None:
            _fill_columns(sample, record)
        return sample

    def _find_misfit(self, record: Json) -> str | None:
        """The reason why the model cannot train on a trajectory, which may have come before the run's limits."""
        tokens, limits = [*record["prompt"]["token_ids"], *record["response_ids"]], self._limits
        where = f"trajectory {record['id']!r} of the buffer service"
        if limits.vocab_size is not None and max(tokens) >= limits.vocab_size:
            return f"{where} must have token ids below {limits.vocab_size}, got {max(tokens)}"
        if limits.max_tokens is not None and len(tokens) > limits.max_tokens:
            return f"{where} must have at most {limits.max_tokens} tokens, got {len(tokens)}"
        return None


def _build_prompt(index: int, record: Json) -> Prompt:
    return Prompt(
        index=index,
        text=record.get("text", ""),
        token_ids=tuple(record["token_ids"]),
        label=record.get("label"),
        metadata=dict(record.get("metadata", {})),
    )


def _fill_columns(sample: Sample, record: Json) -> None:
    number = len(record["response_ids"])
    sample.append(
        record["response_ids"],
        logprobs=record["logprobs"],
        # One number stands for all tokens.
        weight_versions=np.broadcast_to(np.asarray(record["weight_versions"], np.int32), number),
    )
    if record.get("loss_mask") is not None:
        sample.loss_mask = np.asarray(record["loss_mask"], np.uint8)
