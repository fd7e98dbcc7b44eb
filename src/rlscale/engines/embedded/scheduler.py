"""The decode thread: admits prompts into lanes, steps the lanes, and runs control commands between steps.

submit ─> waiting (by lane) ── prefill, once a prompt ──> lanes ── a token a step ──> finished ─> future
call ───> commands, run between two steps: pause, abort, flush, weights
"""

import contextlib
import logging
import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rlscale.engines.embedded.decode_batch import DecodeBatch
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.prefill import Prefiller
from rlscale.engines.embedded.requests import PrefillJob, Request, Sequence, StreamCallback
from rlscale.engines.embedded.sampling import RowParams, Workspace, draw
from rlscale.engines.embedded.weight_store import UNUSABLE_STATUS, WeightStore
from rlscale.engines.server.engine_service import Load
from rlscale.engines.server.generate_request import Answer, GenerateRequest, Refused
from rlscale.engines.server.stop_conditions import Decode
from rlscale.models.batch_shapes import MAX_CACHED_TOKENS, cache_length, slots_of

log = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_WAKE_S = 1.0
ANSWER_S = 0.002  # for the last command's answer to leave, which preparing weights would hold up
FAILED_STATUS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """Figures of the decode loop. Answers depend on them only in their last bits."""

    num_slots: int = 64  # rows of a lane
    max_cached_tokens: int = MAX_CACHED_TOKENS  # of a lane: with long sequences it has fewer rows
    deterministic: bool = True
    num_threads: int | None = None  # of torch, in the decode thread; None: torch's default
    seed: int = 0  # of the seeds drawn for requests that bring none
    eos_ids: frozenset[int] = frozenset()

    def slots_of(self, length: int) -> int:
        """Rows of the lane of this cache length: fixed by the options alone."""
        return slots_of(length, num_slots=self.num_slots, max_cached_tokens=self.max_cached_tokens)


class Scheduler:
    """Owns the model and everything that is being decoded. `submit`, `call` and `load` may be used from any thread.

    `decode` gives the text in which stop strings are looked for; without it there is only empty text.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: WeightStore,
        options: SchedulerOptions,
        *,
        decode: Decode | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._decoder, self.weights, self._options = decoder, weights, options
        self._decode, self._on_death = decode or _no_text, on_death
        self._prefiller = Prefiller(decoder, deterministic=options.deterministic)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lanes: dict[int, DecodeBatch] = {}
        self._scratch = Workspace()  # one for all lanes, which step in turn
        self._waiting: dict[int, deque[PrefillJob]] = {}
        self._tickets: dict[str, Request] = {}
        self._random = random.Random(options.seed)
        self._paused = False
        self._released: set[str] = set()  # memory tags
        self._closing = False
        self.death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    # -- for any thread

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current step; open requests fail."""
        self._commands.put(self._close)
        self._thread.join()

    def submit(self, request: GenerateRequest, listener: StreamCallback | None = None) -> "Future[list[Answer]]":
        """The answers to come. The future fails with `Refused`. `listener` is told of every token until then."""
        return self._schedule(lambda future: self._accept(request, future, listener))

    def call(self, command: Callable[[], T]) -> "Future[T]":
        """Runs `command` in the decode thread between two steps."""

        def run(future: "Future[T]") -> None:
            future.set_result(command())

        return self._schedule(run)

    def load(self) -> Load:
        running = sum(lane.num_active for lane in list(self._lanes.values()))
        total = sum(ticket.num_open for ticket in list(self._tickets.values()))
        return Load(running=running, waiting=max(0, total - running))

    def _schedule(self, run: Callable[["Future[Any]"], None]) -> "Future[Any]":
        future: Future[Any] = Future()

        def guarded() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has gone; from here on it can no longer withdraw the future
            try:
                if self.death is not None:
                    raise Refused(f"the decode thread has ended: {self.death}", status=FAILED_STATUS)
                run(future)
            except Exception as e:
                future.set_exception(e)

        self._commands.put(guarded)
        if self.death is not None:
            self._drain()  # nobody else will
        return future

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    # -- commands (decode thread)

    def abort(self, rid: str | None) -> None:
        """Ends the request `rid`, or all, with what they have."""
        tickets = list(self._tickets.values()) if rid is None else [t for t in [self._tickets.get(rid)] if t]
        for ticket in tickets:
            for sequence in ticket.sequences:
                if sequence.finish is None:
                    self._finish(sequence, {"type": "abort", "message": "Aborted"})
        self._drop_finished_jobs()

    def pause(self, mode: str) -> None:
        """Stops decoding until `resume`. Modes: abort all; retract into the queue; leave in place."""
        self._paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self._paused = False

    def flush(self) -> None:
        """Forgets cached prompts. Refused while sequences are being decoded, as their caches cannot be forgotten."""
        if self._is_busy():
            raise Refused("Flush cache failed.\nThere are running or waiting requests.")
        self.forget_prefills()

    def release_memory(self, tags: Collection[str]) -> None:
        """Frees the caches of all lanes (`kv_cache`), the weights (`weights`). What waits while paused is kept."""
        if self._is_busy():
            raise Refused("release_memory_occupation must come when nothing runs; pause (abort or retract) before it")
        twice = self._released.intersection(tags)
        if twice:
            raise Refused(f"release_memory_occupation must name what is in memory, got {sorted(twice)}")
        if "weights" in tags:
            self._decoder.forget_copies()
            self.weights.release()
        if "kv_cache" in tags:
            self.forget_prefills()
            self._lanes.clear()
            self._scratch = Workspace()
        self._released.update(tags)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Takes back what was released; lanes are made anew when they are needed."""
        present = set(tags) - self._released
        if present:
            raise Refused(f"resume_memory_occupation must name what was released, got {sorted(present)}")
        if "weights" in tags:
            self.weights.regain()
        self._released.difference_update(tags)

    def _is_busy(self) -> bool:
        waiting = any(self._waiting.values())
        return any(lane.num_active for lane in self._lanes.values()) or (waiting and not self._held())

    def forget_prefills(self) -> None:
        for jobs in self._waiting.values():
            for job in jobs:
                job.cache = job.logits = None

    def fail_all(self, error: Refused) -> None:
        for ticket in list(self._tickets.values()):
            self._fail(ticket, error)

    def _close(self) -> None:
        self._closing = True
        self.fail_all(Refused("the server is shutting down", status=503))

    def _accept(
        self, request: GenerateRequest, future: "Future[list[Answer]]", listener: StreamCallback | None
    ) -> None:
        if not self._paused:  # while paused it waits, as what has been retracted does
            self._require_memory()
        self.weights.require_sound()
        if request.rid in self._tickets:
            raise Refused(f"rid must be unique among open requests, got {request.rid!r}")
        params = request.params
        ends = self._options.eos_ids.union(params.stop_token_ids)
        ticket = Request(
            request=request,
            stop_ids=frozenset() if params.ignore_eos else ends,
            late_ids=tuple(sorted(i for i in ends if i < self._decoder.architecture.vocab_size)),
            decode=self._decode,
            future=future,
            listener=listener,
        )
        seed = self._random.getrandbits(63) if params.sampling_seed is None else params.sampling_seed
        ticket.sequences = [Sequence(ticket=ticket, index=j, seed=seed + j) for j in range(request.n)]
        ticket.num_open = request.n
        self._tickets[request.rid] = ticket
        if params.max_new_tokens == 0:
            for sequence in ticket.sequences:
                self._finish(sequence, {"type": "length", "length": 0})
            return
        self._enqueue(request.input_ids, ticket.sequences, ticket)

    # -- the loop (decode thread)

    def _run(self) -> None:
        if self._options.num_threads is not None:
            torch.set_num_threads(self._options.num_threads)  # OpenMP keeps this number per thread
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._run_commands()
                    if not self._held():
                        self._admit()
                        self._step()
        except BaseException as e:
            log.exception("the decode thread has ended")
            self.death = e
            self.fail_all(Refused(f"the decode thread has ended: {e}", status=FAILED_STATUS))
            if self._on_death is not None:
                self._on_death(e)
        self.death = self.death or RuntimeError("closed")
        self._drain()

    def _held(self) -> bool:
        return self._paused or self.weights.updating or bool(self._released) or not self.weights.is_present

    def _require_memory(self) -> None:
        self.weights.require_present()
        if self._released:
            raise Refused("the cache's memory is released; call resume_memory_occupation", status=UNUSABLE_STATUS)

    def _run_commands(self) -> None:
        busy = bool(self._tickets) and not self._held()
        try:
            command = self._commands.get_nowait() if busy else self._wait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            self.weights.expire()
        if self.weights.fault is not None and not self.weights.updating and self._tickets:
            self.fail_all(Refused(f"weights are unusable: {self.weights.fault}", status=503))

    def _wait(self) -> Callable[[], None]:
        """The next command. Raises queue.Empty when none comes for long."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=ANSWER_S)
        if not self._held():
            self._prepare()
        return self._commands.get(timeout=IDLE_WAKE_S)

    def _prepare(self) -> None:
        """Makes copies of new weights while nobody waits, and stops when somebody does."""
        try:
            self._decoder.prepare_copies(self._commands.empty)
        except Exception as e:  # the step that needs them fails in the same way, and its requests are told
            log.warning("weights could not be prepared ahead: %s", e)

    def _admit(self) -> None:
        """Gives free slots to waiting sequences, in their order; prompts are prefilled as they come up."""
        chosen: list[tuple[DecodeBatch, PrefillJob, list[Sequence]]] = []
        for length, jobs in self._waiting.items():
            lane = self._lane(length) if jobs else None
            free = lane.num_free if lane else 0
            while lane and jobs and free:
                job = jobs[0]
                taken = [job.sequences.popleft() for _ in range(min(free, len(job.sequences)))]
                free -= len(taken)
                chosen.append((lane, job, taken))
                if job.sequences:
                    break
                jobs.popleft()
        if not chosen:
            return
        try:
            self._prefiller.run([job for _, job, _ in chosen if job.cache is None])
            self._place(chosen)
        except Exception as e:
            log.exception("prefill failed")
            error = Refused(f"prefill failed: {type(e).__name__}: {e}", status=FAILED_STATUS)
            for ticket in {s.ticket for _, _, taken in chosen for s in taken}:
                self._fail(ticket, error)

    def _place(self, chosen: list[tuple[DecodeBatch, PrefillJob, list[Sequence]]]) -> None:
        """Draws the token after the prefilled ones for each sequence; those that go on get their slots."""
        flat = [(lane, job, s) for lane, job, taken in chosen for s in taken]
        params = RowParams(len(flat))
        for row, (_, _, s) in enumerate(flat):
            s.set_params(params, row)
        logits = torch.stack([job.logits for _, job, _ in flat if job.logits is not None])
        positions = torch.tensor([len(job.tokens) for _, job, _ in flat]).numpy()
        ids, logprobs = draw(logits, params, positions, self._scratch)
        drawn = zip(ids.tolist(), logprobs.tolist(), strict=True)
        for lane, job, taken in chosen:
            for sequence in taken:
                sequence.routes = [] if job.routes is None else [job.routes]
            going_on = [s for s in taken if self._extend(s, *next(drawn))]
            # A failure meanwhile takes all sequences of its request with it.
            going_on = [s for s in going_on if s.finish is None]
            if going_on and job.cache is not None:
                lane.place(going_on, job.cache, len(job.tokens))

    def _step(self) -> None:
        for length, lane in list(self._lanes.items()):
            if not lane.num_active:
                continue
            try:
                # From the last: a slot that is freed is filled from the end, and nothing moves where the end is freed.
                for sequence, token, logprob in reversed(lane.step()):
                    self._extend(sequence, token, logprob)
            except Exception as e:
                log.exception("a decode step failed")
                error = Refused(f"a decode step failed: {type(e).__name__}: {e}", status=FAILED_STATUS)
                del self._lanes[length]
                for ticket in {s.ticket for s in lane.sequences if s is not None}:
                    self._fail(ticket, error)

    # -- sequences

    def _extend(self, sequence: Sequence, token: int, logprob: float) -> bool:
        """Appends a token; True when the sequence goes on."""
        if sequence.finish is not None:
            return False  # its ticket failed earlier in this step
        if not math.isfinite(logprob):
            self._fail(
                sequence.ticket,
                Refused(f"logprobs must be finite, got {logprob}; the model's weights diverged", status=FAILED_STATUS),
            )
            return False
        sequence.append(token, logprob, self.weights.version)
        finish = sequence.ticket.finish_of(sequence)
        if finish is None:
            sequence.ticket.tell(sequence, self.weights.version)
        else:
            self._finish(sequence, finish)
        return finish is None

    def _finish(self, sequence: Sequence, reason: dict[str, object]) -> None:
        sequence.finish = reason
        ticket = sequence.ticket
        self._free(sequence)
        ticket.tell(sequence, self.weights.version)
        ticket.num_open -= 1
        if ticket.num_open == 0:
            self._tickets.pop(ticket.request.rid, None)
            ticket.future.set_result(ticket.answers(self.weights.version))

    def _fail(self, ticket: Request, error: Refused) -> None:
        self._tickets.pop(ticket.request.rid, None)
        for sequence in ticket.sequences:
            if sequence.finish is None:
                sequence.finish = {"type": "abort", "message": str(error)}
                self._free(sequence)
        ticket.num_open = 0
        self._drop_finished_jobs()
        if not ticket.future.done():
            ticket.future.set_exception(error)

    def _free(self, sequence: Sequence) -> None:
        lane = self._lanes.get(cache_length(sequence.ticket.total_len))
        if lane is not None and sequence in lane.sequences:
            lane.remove(sequence)

    def _retract(self) -> None:
        for lane in self._lanes.values():
            retracted = [s for s in lane.sequences if s is not None]
            for sequence in reversed(retracted):
                lane.remove(sequence)
                sequence.num_retractions += 1
                sequence.routes.clear()  # of the cache that is forgotten
                tokens = (*sequence.ticket.request.input_ids, *sequence.ids)
                self._enqueue(tokens, [sequence], sequence.ticket, first=True)
        self.forget_prefills()

    def _enqueue(
        self, tokens: tuple[int, ...], sequences: list[Sequence], ticket: Request, *, first: bool = False
    ) -> None:
        job = PrefillJob(tokens=tokens, sequences=deque(sequences), wants_routes=ticket.request.return_routes)
        jobs = self._waiting.setdefault(cache_length(ticket.total_len), deque())
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)

    def _drop_finished_jobs(self) -> None:
        for length, jobs in self._waiting.items():
            for job in jobs:
                job.sequences = deque(s for s in job.sequences if s.finish is None)
            self._waiting[length] = deque(job for job in jobs if job.sequences)

    def _lane(self, length: int) -> DecodeBatch:
        if length not in self._lanes:
            options = self._options
            self._lanes[length] = DecodeBatch(
                self._decoder,
                length,
                num_slots=options.slots_of(length),
                deterministic=options.deterministic,
                scratch=self._scratch,
            )
        return self._lanes[length]


def _no_text(ids: list[int], *, skip_special_tokens: bool) -> str:
    return ""
