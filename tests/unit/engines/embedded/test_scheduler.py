"""The decode loop: finish reasons, commands, failures, weight updates."""

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.engines.embedded.attention import GroupedAttention
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.server.generate_request import Answer, BadRequest, Refused
from rlscale.errors import WeightSyncError
from rlscale.models.packed_linear import PackedLinear
from rlscale.protocols import IncomingWeights
from rlscale.weight_types import WeightBucket, WeightGroup
from rlscale.weights.receiver import EngineReceiver
from tests.tiny_model import TOKENS, write_tiny_qwen3
from tests.unit.engines.embedded.conftest import OpenScheduler, generate, make_request

PROMPT = [5, 9, 33]


class ScriptedReceiver(EngineReceiver):
    """Writes given tensors instead of receiving them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.error: Exception | None = None

    def join(self, group: WeightGroup, rank: int) -> None: ...

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        return ScriptedWeights(self, bucket)


class ScriptedWeights:
    def __init__(self, receiver: ScriptedReceiver, layout: WeightBucket) -> None:
        self._receiver, self.layout = receiver, layout

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        if self._receiver.error is not None:
            raise self._receiver.error
        assert targets is not None
        for name, target in zip(self.layout.names, targets, strict=True):
            target.copy_(self._receiver.tensors[name])
        return {}


def bucket_of(tensors: dict[str, Tensor]) -> WeightBucket:
    return WeightBucket(
        names=list(tensors),
        dtypes=["float32"] * len(tensors),
        shapes=[list(t.shape) for t in tensors.values()],
        checksums=[],
    )


def run(scheduler: Scheduler, command: Any) -> Any:
    return scheduler.call(command).result(timeout=10)


def wait_until_running(scheduler: Scheduler) -> None:
    deadline = time.monotonic() + 10
    while scheduler.load().running == 0 and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.slow
def test_slots_are_refilled_until_all_are_answered(open_scheduler: OpenScheduler, deterministic: bool) -> None:
    scheduler = open_scheduler(num_slots=3, deterministic=deterministic)
    futures = [
        scheduler.submit(make_request([2 + i], n=4, max_new_tokens=1 + i, sampling_seed=i, ignore_eos=True))
        for i in range(10)
    ]
    for i, future in enumerate(futures):
        assert [len(a.output_ids) for a in future.result(timeout=60)] == [1 + i] * 4
    assert scheduler.load().running == scheduler.load().waiting == 0


def test_zero_new_tokens(open_scheduler: OpenScheduler) -> None:
    answer = generate(open_scheduler(), PROMPT, max_new_tokens=0)[0]
    assert answer.output_ids == [] and answer.finish_reason == {"type": "length", "length": 0}


def test_seed_is_drawn_when_none_is_given(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    answers = [tuple(generate(scheduler, PROMPT, max_new_tokens=8, ignore_eos=True)[0].output_ids) for _ in range(4)]
    assert len(set(answers)) > 1


@pytest.mark.slow
def test_retracted_answer_equals_the_undisturbed_one(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    params: dict[str, Any] = {"max_new_tokens": 200, "sampling_seed": 4, "ignore_eos": True}
    undisturbed = generate(scheduler, PROMPT, **params)[0]
    future = scheduler.submit(make_request(PROMPT, **params))
    wait_until_running(scheduler)
    run(scheduler, lambda: scheduler.pause("retract"))
    assert scheduler.load().running == 0 and scheduler.load().waiting == 1
    run(scheduler, scheduler.flush)
    run(scheduler, scheduler.resume)
    answer = future.result(timeout=60)[0]
    assert answer.output_ids == undisturbed.output_ids
    assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4)
    assert answer.num_retractions == 1


LONG: dict[str, Any] = {"max_new_tokens": 200, "sampling_seed": 4, "ignore_eos": True}


def paused_midway(scheduler: Scheduler, mode: str) -> Any:
    """A request that is paused while it is decoded."""
    while True:
        future = scheduler.submit(make_request(PROMPT, **LONG))
        wait_until_running(scheduler)
        run(scheduler, lambda: scheduler.pause(mode))
        if mode == "abort" or not future.done():
            return future
        run(scheduler, scheduler.resume)  # it ended before the pause, as this thread had to wait


def send_all(scheduler: Scheduler, receiver: ScriptedReceiver, version: str) -> None:
    """A complete update with the tensors of the receiver, without a flush."""
    run(scheduler, scheduler.weights.begin)
    run(scheduler, lambda: scheduler.weights.receive(bucket_of(receiver.tensors), "g"))
    run(scheduler, scheduler.weights.end)
    run(scheduler, lambda: scheduler.weights.set_version(version))


def weights_of(path: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    return {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}


@pytest.mark.slow
def test_pause_abort_returns_the_tokens_so_far(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    undisturbed = generate(scheduler, PROMPT, **LONG)[0]
    answer = paused_midway(scheduler, "abort").result(timeout=10)[0]
    num = len(answer.output_ids)
    assert 0 < num < 200 and answer.finish_reason["type"] == "abort"
    assert (answer.output_ids, answer.logprobs) == (undisturbed.output_ids[:num], undisturbed.logprobs[:num])
    assert scheduler.load().running == scheduler.load().waiting == 0


@pytest.mark.slow
def test_pause_in_place_changes_nothing(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    undisturbed = generate(scheduler, PROMPT, **LONG)[0]
    future = paused_midway(scheduler, "in_place")
    assert scheduler.load().running == 1
    run(scheduler, scheduler.resume)
    answer = future.result(timeout=60)[0]
    # Bit for bit: the cache was never recomputed.
    assert (answer.output_ids, answer.logprobs) == (undisturbed.output_ids, undisturbed.logprobs)
    assert answer.num_retractions == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.slow
def test_update_during_a_pause(open_scheduler: OpenScheduler, tmp_path: Path, mode: str) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    other = open_scheduler(path=write_tiny_qwen3(tmp_path / "other", seed=1))
    receiver.tensors = weights_of(tmp_path / "other")
    old = generate(scheduler, PROMPT, **LONG)[0]
    future = paused_midway(scheduler, mode)
    if mode == "in_place":
        with pytest.raises(Refused, match="Flush cache failed"):
            run(scheduler, scheduler.flush)
    else:
        run(scheduler, scheduler.flush)
    send_all(scheduler, receiver, "1")
    run(scheduler, scheduler.resume)
    answer = future.result(timeout=60)[0]
    assert [span.version for span in answer.spans] == ["0", "1"]
    num = answer.spans[1].start
    assert (answer.output_ids[:num], answer.logprobs[:num]) == (old.output_ids[:num], old.logprobs[:num])
    # The continuation by the new weights alone: equal if the cache was recomputed with them (retract), different if the
    # keys and values of the old weights were kept (in_place).
    continuation = generate(other, [*PROMPT, *answer.output_ids[:num]], **{**LONG, "max_new_tokens": 200 - num})[0]
    same = continuation.output_ids == answer.output_ids[num:] and continuation.logprobs == pytest.approx(
        answer.logprobs[num:], abs=1e-4
    )
    assert same == (mode == "retract")


@pytest.mark.slow
def test_release_frees_the_memory(open_scheduler: OpenScheduler) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    before = generate(scheduler, PROMPT, **LONG)[0]
    held = dict(scheduler.weights._weights.items())
    receiver.tensors = {name: tensor.clone() for name, tensor in held.items()}
    total = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    assert total > 0 and scheduler._batches._batches
    run(scheduler, lambda: scheduler.release_memory(["weights", "kv_cache"]))
    assert sum(tensor.untyped_storage().nbytes() for tensor in held.values()) == 0
    assert not scheduler._batches._batches
    run(scheduler, lambda: scheduler.resume_memory(["weights", "kv_cache"]))
    assert sum(tensor.untyped_storage().nbytes() for tensor in held.values()) == total
    with pytest.raises(Refused, match=r"unusable: their memory was released; send all of them") as failure:
        generate(scheduler, PROMPT, **LONG)
    assert failure.value.status == 503
    send_all(scheduler, receiver, "1")
    after = generate(scheduler, PROMPT, **LONG)[0]
    assert (after.output_ids, after.logprobs) == (before.output_ids, before.logprobs)


def test_a_release_returns_memory_to_the_driver_when_all_is_freed(
    open_scheduler: OpenScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch keeps freed memory for itself, and the trainer is another process."""
    scheduler = open_scheduler(ScriptedReceiver())
    held, kept = dict(scheduler.weights._weights.items()), list[int]()
    monkeypatch.setattr(
        scheduler._decoder,
        "return_cached_memory",
        lambda: kept.append(sum(tensor.untyped_storage().nbytes() for tensor in held.values())),
    )
    run(scheduler, lambda: scheduler.release_memory(["weights", "kv_cache"]))
    assert kept == [0]


def test_incomplete_update_does_not_make_released_weights_usable(open_scheduler: OpenScheduler) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    whole = {name: tensor.clone() for name, tensor in scheduler.weights._weights.items()}
    run(scheduler, lambda: scheduler.release_memory(["weights"]))
    with pytest.raises(Refused, match=r"cannot be updated: .* resume_memory_occupation"):
        run(scheduler, scheduler.weights.begin)
    run(scheduler, lambda: scheduler.resume_memory(["weights"]))
    receiver.tensors = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight was not"):
        send_all(scheduler, receiver, "1")
    with pytest.raises(Refused, match="unusable"):
        generate(scheduler, PROMPT, max_new_tokens=2)
    receiver.tensors = whole
    send_all(scheduler, receiver, "2")
    assert len(generate(scheduler, PROMPT, max_new_tokens=2, ignore_eos=True)[0].output_ids) == 2


@pytest.mark.slow
def test_requests_that_wait_in_a_pause_survive_a_release(open_scheduler: OpenScheduler) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    undisturbed = generate(scheduler, PROMPT, **LONG)[0]
    receiver.tensors = {name: tensor.clone() for name, tensor in scheduler.weights._weights.items()}
    future = paused_midway(scheduler, "retract")
    run(scheduler, lambda: scheduler.release_memory(["weights", "kv_cache"]))
    late = scheduler.submit(make_request(PROMPT, max_new_tokens=2, ignore_eos=True))
    run(scheduler, scheduler.resume)
    with pytest.raises(Refused, match="released"):
        generate(scheduler, PROMPT, max_new_tokens=2)
    run(scheduler, lambda: scheduler.resume_memory(["weights", "kv_cache"]))
    for _ in range(5):  # between two commands the scheduler makes a step if it may
        run(scheduler, lambda: None)
    assert not future.done() and not late.done()
    send_all(scheduler, receiver, "1")
    assert future.result(timeout=60)[0].output_ids == undisturbed.output_ids
    assert len(late.result(timeout=60)[0].output_ids) == 2


@pytest.mark.slow
def test_release_and_resume_at_the_wrong_time_are_refused(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    future = scheduler.submit(make_request(PROMPT, **LONG))
    wait_until_running(scheduler)
    with pytest.raises(Refused, match="when nothing runs"):
        run(scheduler, lambda: scheduler.release_memory(["kv_cache"]))
    assert len(future.result(timeout=60)[0].output_ids) == 200
    with pytest.raises(Refused, match="what was released"):
        run(scheduler, lambda: scheduler.resume_memory(["kv_cache"]))
    run(scheduler, lambda: scheduler.release_memory(["kv_cache"]))
    with pytest.raises(Refused, match="what is in memory"):
        run(scheduler, lambda: scheduler.release_memory(["kv_cache"]))
    with pytest.raises(Refused, match="released; call resume_memory_occupation"):
        generate(scheduler, PROMPT, max_new_tokens=2)
    run(scheduler, lambda: scheduler.resume_memory(["kv_cache"]))
    assert len(generate(scheduler, PROMPT, max_new_tokens=2, ignore_eos=True)[0].output_ids) == 2


def test_callback_receives_every_token(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    received: list[tuple[int, Answer]] = []
    request = make_request(PROMPT, n=2, max_new_tokens=5, sampling_seed=1, ignore_eos=True)
    answers = scheduler.submit(request, lambda index, answer: received.append((index, answer))).result(timeout=10)
    for j, answer in enumerate(answers):
        states = [state for index, state in received if index == j]
        assert [len(state.output_ids) for state in states] == [1, 2, 3, 4, 5]
        assert [state.finish_reason is None for state in states] == [True] * 4 + [False]
        assert states[-1].output_ids == answer.output_ids and states[-1].finish_reason == answer.finish_reason


def test_stop_string_that_spans_tokens(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    full = generate(scheduler, PROMPT, max_new_tokens=20, sampling_seed=1, ignore_eos=True)[0]
    stop = "".join(TOKENS[i] for i in full.output_ids[6:9])
    cut = generate(scheduler, PROMPT, max_new_tokens=20, sampling_seed=1, ignore_eos=True, stop=("never", stop))[0]
    assert cut.output_ids == full.output_ids[:9] and cut.logprobs == full.logprobs[:9]
    assert cut.finish_reason == {"type": "stop", "matched": stop}


def test_weights_that_diverged_fail_the_request_and_not_the_server(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    norm = dict(scheduler.weights._weights.items())["model.norm.weight"]
    good = norm.clone()
    run(scheduler, lambda: norm.fill_(math.nan))
    with pytest.raises(Refused, match="logprobs must be finite") as failure:
        generate(scheduler, PROMPT, n=3, max_new_tokens=4)
    assert failure.value.status == 500
    run(scheduler, lambda: norm.copy_(good))
    assert len(generate(scheduler, PROMPT, max_new_tokens=4, ignore_eos=True)[0].output_ids) == 4


def test_failing_step_fails_its_requests_with_500(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    future = scheduler.submit(make_request(PROMPT, max_new_tokens=400, ignore_eos=True))
    wait_until_running(scheduler)
    attention = scheduler._decoder._layers[0].attention
    assert isinstance(attention, GroupedAttention)
    good = attention.output
    run(scheduler, lambda: setattr(attention, "output", PackedLinear(torch.zeros(3, 3), None)))
    with pytest.raises(Refused, match="a decode step failed") as failure:
        future.result(timeout=10)
    assert failure.value.status == 500
    with pytest.raises(Refused, match="prefill failed"):
        generate(scheduler, PROMPT, max_new_tokens=4)
    run(scheduler, lambda: setattr(attention, "output", good))
    assert len(generate(scheduler, PROMPT, max_new_tokens=4, ignore_eos=True)[0].output_ids) == 4


def test_dead_thread_is_reported(open_scheduler: OpenScheduler, model_path: Path) -> None:
    scheduler = open_scheduler()
    reported = threading.Event()
    scheduler._on_death = lambda error: reported.set()

    def die() -> None:
        raise SystemExit("the end")

    scheduler.call(die)
    assert reported.wait(10)
    with pytest.raises(Refused, match="the decode thread has ended: the end"):
        generate(scheduler, PROMPT, max_new_tokens=4)


def test_update_of_all_weights_changes_the_answers(open_scheduler: OpenScheduler, tmp_path: Path) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    other = open_scheduler(path=write_tiny_qwen3(tmp_path / "other", seed=1))
    receiver.tensors = weights_of(tmp_path / "other")
    params: dict[str, Any] = {"max_new_tokens": 10, "sampling_seed": 1, "ignore_eos": True}
    before = generate(scheduler, PROMPT, **params)[0]
    run(scheduler, scheduler.weights.begin)
    held = scheduler.submit(make_request(PROMPT, **params))
    names = list(receiver.tensors)
    for part in (names[:5], names[5:]):
        bucket = bucket_of({name: receiver.tensors[name] for name in part})
        run(scheduler, lambda bucket=bucket: scheduler.weights.receive(bucket, "g"))
    assert not held.done()
    run(scheduler, scheduler.weights.end)
    run(scheduler, lambda: scheduler.weights.set_version("1"))
    after = generate(scheduler, PROMPT, **params)[0]
    assert after.weight_version == "1" and before.weight_version == "0"
    expected = generate(other, PROMPT, **params)[0]
    assert (after.output_ids, after.logprobs) == (expected.output_ids, expected.logprobs)
    assert held.result(timeout=10)[0].output_ids == expected.output_ids
    assert before.output_ids != after.output_ids


def test_new_weights_are_packed_while_nothing_runs_but_not_in_a_pause(
    open_scheduler: OpenScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, idle = threading.Event(), threading.Event()
    scheduler = open_scheduler()
    prepare_weights = scheduler._prepare_weights

    def prepare() -> None:
        prepare_weights()
        idle.set()

    def pause() -> None:
        scheduler.pause("retract")
        prepared.clear()
        idle.clear()

    monkeypatch.setattr(scheduler._decoder, "pack_weights", lambda may_continue: prepared.set())
    monkeypatch.setattr(scheduler, "_prepare_weights", prepare)
    run(scheduler, pause)
    assert idle.wait(60)  # the decode thread had time to pack them
    assert not prepared.is_set()  # no request may use them yet
    run(scheduler, scheduler.resume)
    assert prepared.wait(60)


def test_failed_update_leaves_the_engine_unusable_until_a_complete_one(open_scheduler: OpenScheduler) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    weights = scheduler.weights
    receiver.tensors = {name: tensor.clone() for name, tensor in weights._weights.items()}
    bucket = bucket_of(receiver.tensors)
    run(scheduler, weights.begin)
    waiting = scheduler.submit(make_request(PROMPT, max_new_tokens=2))
    receiver.error = WeightSyncError("model.norm.weight must arrive with checksum a, got b")
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        run(scheduler, lambda: weights.receive(bucket, "g"))
    for future in (waiting, scheduler.submit(make_request(PROMPT, max_new_tokens=2))):
        with pytest.raises(Refused, match=r"unusable: .*model\.norm\.weight") as failure:
            future.result(timeout=10)
        assert failure.value.status == 503
    receiver.error = None
    run(scheduler, weights.begin)
    run(scheduler, lambda: weights.receive(bucket, "g"))
    run(scheduler, weights.end)
    assert len(generate(scheduler, PROMPT, max_new_tokens=2, ignore_eos=True)[0].output_ids) == 2


def test_update_that_lacks_a_tensor_names_it(open_scheduler: OpenScheduler) -> None:
    receiver = ScriptedReceiver()
    scheduler = open_scheduler(receiver)
    weights = scheduler.weights
    receiver.tensors = {n: t.clone() for n, t in weights._weights.items() if n != "model.norm.weight"}
    run(scheduler, weights.begin)
    run(scheduler, lambda: weights.receive(bucket_of(receiver.tensors), "g"))
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight was not"):
        run(scheduler, weights.end)


@pytest.mark.slow
def test_update_expires_if_its_trainer_is_gone(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler(ScriptedReceiver())
    group = WeightGroup(
        name="g", master_address="127.0.0.1", master_port=1, world_size=2, backend="gloo", timeout_s=0.2
    )
    run(scheduler, lambda: scheduler.weights.join(group, 1))
    run(scheduler, scheduler.weights.begin)
    with pytest.raises(Refused, match=r"not ended within 0\.2 s"):
        scheduler.submit(make_request(PROMPT, max_new_tokens=2)).result(timeout=10)


@pytest.mark.parametrize(
    ("name", "shape", "field"),
    [("model.nothing.weight", [64], "names"), ("model.norm.weight", [65], "shapes")],
)
def test_invalid_bucket_is_refused_before_it_is_received(
    open_scheduler: OpenScheduler, name: str, shape: list[int], field: str
) -> None:
    scheduler = open_scheduler(ScriptedReceiver())
    run(scheduler, scheduler.weights.begin)
    bucket = WeightBucket(names=[name], dtypes=["float32"], shapes=[shape], checksums=[])
    with pytest.raises(BadRequest) as failure:
        run(scheduler, lambda: scheduler.weights.receive(bucket, "g"))
    assert failure.value.field == field


def test_long_sequences_have_fewer_slots(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler(num_slots=8, max_cached_tokens=64)
    future = scheduler.submit(make_request(PROMPT, n=5, max_new_tokens=40, ignore_eos=True, sampling_seed=1))
    assert [len(a.output_ids) for a in future.result(timeout=60)] == [40] * 5
    assert scheduler._batches._batches[64].num_slots == 1


@pytest.mark.slow
def test_cache_of_a_compact_batch_grows_on_demand(open_scheduler: OpenScheduler) -> None:
    compact, fixed = open_scheduler(deterministic=False), open_scheduler()
    params: dict[str, Any] = {"max_new_tokens": 250, "sampling_seed": 1, "ignore_eos": True}
    expected = generate(fixed, PROMPT, n=3, **params)
    for _ in range(2):  # also when the batch was long before
        lengths: list[int] = []
        request = make_request(PROMPT, n=3, **params)
        seen = lengths.append
        future = compact.submit(
            request, lambda *_, seen=seen: seen(compact._batches._batches[256]._cache.values.shape[3])
        )
        for answer, other in zip(future.result(timeout=60), expected, strict=True):
            assert answer.output_ids == other.output_ids
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        lengths = lengths[3:]  # the first token of each sequence follows from the prompt alone
        assert lengths == sorted(lengths) and set(range(32, 257, 32)) >= set(lengths) >= set(range(32, 225, 32))
    assert fixed._batches._batches[256]._cache.values.shape[3] == 256
