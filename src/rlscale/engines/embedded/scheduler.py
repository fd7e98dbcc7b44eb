"""The decode thread: admits prompts into decode batches, steps them, and runs control commands between steps.

submit ─> Inbox ─> PrefillQueue ── prefill, once per prompt ──> DecodeBatch ── a token per step ──> finished ─> future
call ───> Inbox, run between two steps: pause, abort, flush, weights
"""

import logging
import random
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

import torch

from rlscale.engines.embedded.adapter_store import AdapterStore
from rlscale.engines.embedded.batch_pool import BatchPool
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.inbox import FAILED_STATUS, Inbox
from rlscale.engines.embedded.open_requests import OpenRequests
from rlscale.engines.embedded.prefill import Prefiller
from rlscale.engines.embedded.prefill_queue import Admission, PrefillQueue
from rlscale.engines.embedded.prompt_scorer import PromptScorer
from rlscale.engines.embedded.requests import Request, Sequence, StreamCallback
from rlscale.engines.embedded.sampling import RowParams, draw
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.engines.embedded.weight_store import UNUSABLE_STATUS, WeightStore
from rlscale.engines.server.engine_service import Load
from rlscale.engines.server.generate_request import Answer, GenerateRequest, Refused
from rlscale.engines.server.stop_conditions import Decode

log = logging.getLogger(__name__)

T = TypeVar("T")


class Scheduler:
    """Owns the model and all running requests. `submit`, `call` and `load` may be used from any thread.

    All other methods run in the decode thread, through `call`.

    Args:
        decode: token ids to the text in which stop strings are searched; None: no text, so no stop strings.
        on_death: called with the exception that ended the decode thread.

    Example:
        scheduler = Scheduler(decoder, weights, SchedulerOptions(num_slots=16))
        scheduler.start()
        [answer] = scheduler.submit(request).result()
        scheduler.call(lambda: scheduler.pause("retract")).result()
        scheduler.close()
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
        self.adapters = AdapterStore(
            list(decoder.projections()),
            dtype=decoder.dtype,
            device=decoder.device,
            checksum=weights.checksum,
            max_versions=options.max_adapters,
            aliases=decoder.layer_aliases,
        )
        self._prefiller = Prefiller(decoder, deterministic=options.deterministic)
        self._inbox = Inbox()
        self._batches = BatchPool(decoder, options)
        self._queue = PrefillQueue()
        self._requests = OpenRequests(weights, on_finish=self._batches.remove, on_fail=self._queue.drop_finished)
        self._scorer = PromptScorer(decoder, self._requests, deterministic=options.deterministic)
        self._random = random.Random(options.seed)
        self._paused = False
        self._released: set[str] = set()  # memory tags
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    # -- any thread

    @property
    def death(self) -> BaseException | None:
        """The exception that ended the decode thread; None while it runs."""
        return self._inbox.closed_by

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current step; open requests fail."""

        def close(future: "Future[None]") -> None:
            self._closing = True
            self._requests.fail_all(Refused("the server is shutting down", status=503))

        self._inbox.post(close)
        self._thread.join()

    def submit(self, spec: GenerateRequest, on_token: StreamCallback | None = None) -> "Future[list[Answer]]":
        """Starts a request and returns the future of its answers, which fails with `Refused`.

        Args:
            on_token: called in the decode thread after every token, until the future is done.
        """
        return self._inbox.post(lambda future: self._accept(spec, future, on_token))

    def call(self, command: Callable[[], T]) -> "Future[T]":
        """Runs `command` in the decode thread between two steps."""
        return self._inbox.post(lambda future: future.set_result(command()))

    def load(self) -> Load:
        running = self._batches.num_active
        return Load(running=running, waiting=max(0, self._requests.num_open - running))

    # -- commands (decode thread)

    def abort(self, rid: str | None, *, adapter: str | None = None) -> None:
        """Finishes the request `rid`, or all, or all of an adapter, with the tokens they have."""
        self._requests.abort(rid, adapter=adapter)
        self._queue.drop_finished()

    def pause(self, mode: str) -> None:
        """Stops decoding until `resume`. `abort` ends requests, `retract` requeues them, `in_place` keeps slots."""
        self._paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for sequence in self._batches.remove_all():
                sequence.num_retractions += 1
                sequence.routes.clear()  # they belong to the cache that is discarded
                tokens = (*sequence.request.spec.input_ids, *sequence.ids)
                self._queue.add(tokens, [sequence], sequence.request, first=True)
            self._queue.forget_prefills()

    def resume(self) -> None:
        self._paused = False

    def flush(self) -> None:
        """Discards computed prompts. Refused while sequences are decoded: their caches are still needed."""
        if self._is_busy():
            raise Refused("Flush cache failed.\nThere are running or waiting requests.")
        self._queue.forget_prefills()

    def forget_prefills(self) -> None:
        """Discards computed prompts, whatever is running."""
        self._queue.forget_prefills()

    def release_memory(self, tags: Collection[str]) -> None:
        """Frees the KV caches (`kv_cache`) or the weights (`weights`). Requests that wait during a pause are kept."""
        if self._is_busy():
            raise Refused("release_memory_occupation must come when nothing runs; pause (abort or retract) before it")
        twice = self._released.intersection(tags)
        if twice:
            raise Refused(f"release_memory_occupation must name what is in memory, got {sorted(twice)}")
        if "weights" in tags:
            self._decoder.free_packed_weights()
            self.weights.release()
        if "kv_cache" in tags:
            self._queue.forget_prefills()
            self._batches.release()
        self._decoder.return_cached_memory()
        self._released.update(tags)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Allocates released memory again. Decode batches are created when they are needed."""
        present = set(tags) - self._released
        if present:
            raise Refused(f"resume_memory_occupation must name what was released, got {sorted(present)}")
        if "weights" in tags:
            self.weights.allocate()
        self._released.difference_update(tags)

    # -- the loop (decode thread)

    def _run(self) -> None:
        if self._options.num_threads is not None:
            torch.set_num_threads(self._options.num_threads)  # OpenMP keeps this number per thread
        death: BaseException = RuntimeError("closed")
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._run_commands()
                    if not self._is_held():
                        self._admit()
                        self._step()
                        self._scorer.step(state=self.weights.num_writes)
        except BaseException as e:
            log.exception("the decode thread has ended")
            death = self._inbox.closed_by = e
            self._requests.fail_all(Refused(f"the decode thread has ended: {e}", status=FAILED_STATUS))
            if self._on_death is not None:
                self._on_death(e)
        self._inbox.close(death)

    def _run_commands(self) -> None:
        is_busy = bool(self._requests) and not self._is_held()
        self._inbox.run_all(on_idle=None if is_busy else self._prepare_weights)
        self.weights.expire()
        if self.weights.fault is not None and not self.weights.updating and self._requests:
            self._requests.fail_all(Refused(f"weights are unusable: {self.weights.fault}", status=503))

    def _prepare_weights(self) -> None:
        """Packs new weights while no request needs the thread, and stops when a command arrives."""
        if self._is_held():
            return
        try:
            self._decoder.pack_weights(lambda: self._inbox.is_empty)
        except Exception as e:  # the step that needs them fails in the same way and reports it to its requests
            log.warning("weights could not be prepared ahead: %s", e)

    def _is_held(self) -> bool:
        """Reports whether decoding is blocked now."""
        return self._paused or self.weights.updating or bool(self._released) or not self.weights.is_present

    def _is_busy(self) -> bool:
        is_waiting = not self._queue.is_empty or not self._scorer.is_empty
        return bool(self._batches.num_active) or (is_waiting and not self._is_held())

    def _accept(self, spec: GenerateRequest, future: "Future[list[Answer]]", on_token: StreamCallback | None) -> None:
        if not self._paused:  # during a pause a request waits, like retracted ones
            self.weights.require_present()
            if self._released:
                raise Refused("the cache's memory is released; call resume_memory_occupation", status=UNUSABLE_STATUS)
        self.weights.require_sound()
        if spec.rid in self._requests:
            raise Refused(f"rid must be unique among open requests, got {spec.rid!r}")
        params = spec.params
        ends = self._options.eos_ids.union(params.stop_token_ids)
        request = Request(
            spec=spec,
            adapter=self.adapters.find(spec.adapter),
            stop_ids=frozenset() if params.ignore_eos else ends,
            blocked_ids=tuple(sorted(i for i in ends if i < self._decoder.architecture.vocab_size)),
            decode=self._decode,
            future=future,
            on_token=on_token,
        )
        seed = self._random.getrandbits(63) if params.sampling_seed is None else params.sampling_seed
        request.sequences = [Sequence(request=request, index=j, seed=seed + j) for j in range(spec.n)]
        request.num_open = spec.n
        self._requests.add(request)
        if spec.logprob_start is not None:
            self._scorer.add(request)
            return
        if params.max_new_tokens == 0:
            for sequence in request.sequences:
                self._requests.finish(sequence, {"type": "length", "length": 0})
            return
        if spec.images and self._decoder.tower is not None:
            request.rotary_offset = self._decoder.tower.rotary_offset(spec.input_ids, spec.images)
        self._queue.add(spec.input_ids, request.sequences, request)

    def _admit(self) -> None:
        """Assigns free slots to waiting sequences in order of arrival, and computes their prompts."""
        admitted = self._queue.pop(lambda length: self._batches.get(length).num_free)
        if not admitted:
            return
        try:
            self._prefiller.run([job for _, job, _ in admitted if job.cache is None], state=self.weights.num_writes)
            self._place(admitted)
        except Exception as e:
            log.exception("prefill failed")
            error = Refused(f"prefill failed: {type(e).__name__}: {e}", status=FAILED_STATUS)
            for request in {s.request for _, _, sequences in admitted for s in sequences}:
                self._requests.fail(request, error)

    def _place(self, admitted: list[Admission]) -> None:
        """Draws the first token after the prompt for each sequence, and assigns slots to those that continue."""
        flat = [(job, s) for _, job, sequences in admitted for s in sequences]
        params = RowParams(len(flat))
        for row, (_, s) in enumerate(flat):
            s.set_params(params, row)
        logits = torch.stack([job.logits for job, _ in flat if job.logits is not None])
        positions = torch.tensor([len(job.tokens) for job, _ in flat]).numpy()
        ids, logprobs = draw(logits, params, positions, self._batches.workspace)
        drawn = zip(ids.tolist(), logprobs.tolist(), strict=True)
        for length, job, sequences in admitted:
            for sequence in sequences:
                sequence.routes = [] if job.routes is None else [job.routes]
            continuing = [s for s in sequences if self._requests.extend(s, *next(drawn))]
            # A failure of one sequence ends all sequences of its request.
            continuing = [s for s in continuing if s.finish is None]
            if continuing and job.cache is not None:
                self._batches.get(length).place(continuing, job.cache, len(job.tokens))

    def _step(self) -> None:
        for batch in self._batches.active():
            try:
                # From the last slot: a freed slot is filled from the end, so freeing the end moves nothing.
                for sequence, token, logprob in reversed(batch.step()):
                    self._requests.extend(sequence, token, logprob)
            except Exception as e:
                log.exception("a decode step failed")
                error = Refused(f"a decode step failed: {type(e).__name__}: {e}", status=FAILED_STATUS)
                self._batches.discard(batch)
                for request in {s.request for s in batch.sequences if s is not None}:
                    self._requests.fail(request, error)


def _no_text(ids: list[int], *, skip_special_tokens: bool) -> str:
    return ""
