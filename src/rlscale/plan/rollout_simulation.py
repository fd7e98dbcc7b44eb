"""Simulation of rollouts with given response lengths: the time of each schedule, in decoding steps.

    prompts ──> queue ──> slots, a token per decoding step each ──> groups ──> rollout ──> training
                  ▲                                                    │
                  └── aborted requests with their tokens, surplus <────┘

All engines are one set of slots. Time is counted in decoding steps with all slots; `EngineCosts` states what else takes
time in the engine. Grading and weight sync take none. Weights have a new version after each rollout that was trained
on: tokens that are too old for `rollout.max_staleness`, and requests of more than `sampling.max_weight_versions`
versions, are generated again, as in a run.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlscale.config.groups.sampling import TAIL_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCosts:
    """Times of an engine, in decoding steps with all slots. The defaults: decoding alone takes time."""

    step_of_one: float = 1.0  # a step of a single request; the time grows linearly with the number of requests
    request: float = 0.0  # transfer of a request and its answer, wherever it waits or runs
    abort: float = 0.0  # of a request
    prefill: float = 0.0  # of a prompt, or of all prompts that get slots at once; a shorter one takes as long
    prefill_token: float = 0.0  # of a response that is continued, which is computed alone

    def step(self, running_share: float) -> float:
        """Time of a decoding step with this share of the slots running."""
        return self.step_of_one + (1 - self.step_of_one) * running_share


NO_COSTS = EngineCosts()


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedLoop:
    """Settings of a loop."""

    num_groups: int  # of a rollout
    num_samples: int  # of a group
    num_slots: int  # requests that all engines decode concurrently
    schedule: str = "plain"  # a value of `sampling.schedule`
    wave: int | None = None  # groups in flight, `sampling.over_sampling_batch_size`; None: `num_groups`
    is_partial: bool = False  # `sampling.partial_rollout`
    max_versions: int | None = None  # `sampling.max_weight_versions`, of partial rollouts; None: no limit
    max_staleness: int = 0
    costs: EngineCosts = NO_COSTS
    train_steps: float = 0.0  # time of training on a rollout, in decoding steps
    num_rollouts: int = 40
    seed: int = 0

    @property
    def requests_per_slot(self) -> float:
        return self.num_groups * self.num_samples / self.num_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTime:
    """Result of a simulation."""

    steps_per_rollout: float  # decoding steps, training included
    busy_share: float  # of the slots, over the whole run


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    """A response that is generated. Its end is a number of decoding steps since the start of the run."""

    group: _Group
    length: int
    num_done: int = 0  # tokens that were generated before it was aborted
    first_version: int | None = None  # of its tokens; None: it has none
    end: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Group:
    expected: float
    requests: list[_Request] = field(default_factory=list)
    num_open: int = 0  # requests that have not ended
    rollout: _Rollout | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Rollout:
    groups: list[_Group]
    num_done: int = 0
    is_complete: bool = False


@dataclass(slots=True)
class _Simulation:
    loop: SimulatedLoop
    prompts: Sequence[Sequence[int]]
    now: float = 0.0
    num_steps: float = 0.0  # decoding steps so far
    num_tokens: float = 0.0
    version: int = 0  # of the weights
    number: int = 0  # of requests, for the order of equal ends
    queue: deque[_Request] = field(default_factory=deque)
    running: list[tuple[float, int, _Request]] = field(default_factory=list)  # heap by end
    started: deque[_Rollout] = field(default_factory=deque)
    buffer: list[_Group] = field(default_factory=list)
    held: list[_Group] = field(default_factory=list)
    early: list[_Group] = field(default_factory=list)
    rng: random.Random = field(default_factory=random.Random)
    limit: float = 0.0

    def run(self) -> SimulatedTime:
        loop, num_started, trained_at = self.loop, 0, float("inf")
        while self.version < loop.num_rollouts:
            # Rollout r starts once r - k are trained on, and fewer than max(1, k) wait or are generated.
            while num_started - self.version <= loop.max_staleness and num_started < loop.num_rollouts:
                if len(self.started) >= max(1, loop.max_staleness):
                    break
                self._start()
                num_started += 1
            if trained_at == float("inf") and self.started and self.started[0].is_complete:
                self.started.popleft()
                trained_at = self.now + loop.train_steps
                continue
            step = loop.costs.step(len(self.running) / loop.num_slots)
            until_token = (self.running[0][0] - self.num_steps) * step if self.running else float("inf")
            taken = min(until_token, max(0.0, trained_at - self.now))
            self.now += taken
            if trained_at <= self.now:
                self.num_steps += taken / step
                self.version, trained_at = self.version + 1, float("inf")
            else:
                self.num_steps = self.running[0][0]  # exactly: ends are compared
                self._finish(heapq.heappop(self.running)[2])
        share = self.num_tokens / (self.now * loop.num_slots)
        return SimulatedTime(steps_per_rollout=self.now / loop.num_rollouts, busy_share=share)

    def _start(self) -> None:
        wanted = self.loop.wave or self.loop.num_groups
        groups, self.buffer = self.buffer[:wanted], self.buffer[wanted:]
        groups += self._draw(wanted - len(groups))
        rollout, costs = _Rollout(groups=groups), self.loop.costs
        self.started.append(rollout)
        for group in groups:
            group.rollout = rollout
            self._restart_old(group)
            waiting = [request for request in group.requests if request.num_done < request.length]
            group.num_open = len(waiting)
            self.queue += waiting
            self.now += costs.request * len(waiting)
        rollout.num_done = sum(not group.num_open for group in groups)
        self._fill()
        self._complete_if_done(rollout)

    def _restart_old(self, group: _Group) -> None:
        """Discards tokens that must not be trained on, or not be continued."""
        loop, max_age = self.loop, self.loop.max_staleness
        ages = [0 if each.first_version is None else self.version - each.first_version for each in group.requests]
        if loop.is_partial:
            max_age = loop.num_rollouts if loop.max_versions is None else loop.max_versions - 1 + max_age
        is_finished = all(each.num_done == each.length for each in group.requests)
        for request, age in zip(group.requests, ages, strict=True):
            # A finished group is judged as a whole, as it is trained on; others by their unfinished requests.
            if max(ages) > max_age if is_finished else request.num_done < request.length and age > max_age:
                request.num_done, request.first_version = 0, None

    def _draw(self, number: int) -> list[_Group]:
        loop, taken = self.loop, list[_Group]()
        if loop.schedule != "tail_batching":
            taken = [self._new() for _ in range(number)]
        while len(taken) < number:
            if len(self.held) >= number:
                long, self.held, self.early = self.held[:number], self.held[number:], [*taken, *self.early]
                taken = long
                break
            group = self.early.pop(0) if self.early else self._new()
            (self.held if group.expected > self.limit else taken).append(group)
        if loop.schedule == "plain":
            return taken
        return sorted(taken, key=lambda group: -group.expected)

    def _new(self) -> _Group:
        lengths = self.rng.choice(self.prompts)
        # The engines report earlier responses of the prompt: the mean of its line.
        group = _Group(expected=sum(lengths) / len(lengths))
        group.requests = [_Request(group=group, length=self.rng.choice(lengths)) for _ in range(self.loop.num_samples)]
        return group

    def _fill(self) -> None:
        costs, has_new = self.loop.costs, False
        while self.queue and len(self.running) < self.loop.num_slots:
            request = self.queue.popleft()
            if request.num_done:
                self.now += max(costs.prefill, costs.prefill_token * request.num_done)
            elif not has_new:
                has_new, self.now = True, self.now + costs.prefill
            if request.first_version is None:
                request.first_version = self.version
            self.number += 1
            request.end = self.num_steps + request.length - request.num_done
            heapq.heappush(self.running, (request.end, self.number, request))

    def _finish(self, request: _Request) -> None:
        group = request.group
        self.num_tokens += request.length - request.num_done
        request.num_done = request.length
        group.num_open -= 1
        self._fill()
        rollout = group.rollout
        assert rollout is not None, "a running group belongs to a rollout"
        if not group.num_open:
            rollout.num_done += 1
            self._complete_if_done(rollout)

    def _complete_if_done(self, rollout: _Rollout) -> None:
        loop, groups = self.loop, rollout.groups
        if rollout.is_complete:
            return
        if loop.is_partial:
            done = rollout.num_done >= loop.num_groups
        else:
            # The first groups in the order of their prompts, whichever finishes first.
            done = not any(group.num_open for group in groups[: loop.num_groups])
        if not done:
            return
        rollout.is_complete = True
        kept = [group for group in groups if not group.num_open][: loop.num_groups]
        names = {id(group) for group in kept}
        others = [group for group in groups if id(group) not in names]
        unfinished = [group for group in others if group.num_open]
        self._stop({id(group) for group in unfinished})
        if not loop.is_partial:
            # They start again: only partial rollouts continue aborted requests.
            for request in (each for group in unfinished for each in group.requests):
                request.num_done, request.first_version = 0, None
        self.buffer += others

    def _stop(self, stopped: set[int]) -> None:
        """Takes the requests of groups out of slots and queue."""
        if not stopped:
            return
        num_open = len(self.queue) + len(self.running)
        self.queue = deque(each for each in self.queue if id(each.group) not in stopped)
        for request in (each for _, _, each in self.running if id(each.group) in stopped):
            num_done = request.length - max(1, round(request.end - self.num_steps))
            self.num_tokens += num_done - request.num_done
            request.num_done = num_done
        self.running = [entry for entry in self.running if id(entry[2].group) not in stopped]
        heapq.heapify(self.running)
        self.now += self.loop.costs.abort * (num_open - len(self.queue) - len(self.running))
        self._fill()


def simulate(loop: SimulatedLoop, prompts: Sequence[Sequence[int]]) -> SimulatedTime:
    """Simulates a run. Each prompt is a list of lengths, of which its responses have random ones; all at least 1."""
    means = sorted(sum(lengths) / len(lengths) for lengths in prompts)
    limit = means[int((1 - TAIL_SHARE) * (len(means) - 1))]
    return _Simulation(loop, prompts, rng=random.Random(loop.seed), limit=limit).run()
