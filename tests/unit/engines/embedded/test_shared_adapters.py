"""Adapters of several jobs in one engine: their own names, one bound, and no call that stops the others."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.engines.embedded.embedded_service import EmbeddedService
from rlscale.engines.embedded.row_adapters import AdapterStack, AdapterStacks
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.server.generate_request import BadRequest, FolderUpdate, Limits, Refused
from tests.unit.engines.embedded.conftest import OpenScheduler, make_request
from tests.unit.engines.embedded.test_adapters import GREEDY, LAYERS, PROMPT, RANK, answer, load, tensors_of, update_of


@pytest.fixture
def shared(open_scheduler: OpenScheduler) -> Scheduler:
    """An engine with the adapters of two jobs, and room for one more version."""
    scheduler = open_scheduler(max_adapters=4)
    for seed, name in enumerate(("a", "b")):
        load(scheduler, update_of(tensors_of(scheduler, seed), name=name, version="7"))
    load(scheduler, update_of(tensors_of(scheduler, 2), name="b", version="8", num_kept=2))
    return scheduler


def test_the_end_of_one_job_leaves_the_adapters_of_the_other(shared: Scheduler) -> None:
    expected = answer(shared, "b")
    shared.call(lambda: shared.adapters.unload("a")).result(timeout=60)
    assert shared.adapters.loaded() == {"b": ["7", "8"]}
    got = answer(shared, "b")
    assert (got.output_ids, got.logprobs, got.weight_version) == (expected.output_ids, expected.logprobs, "8")
    with pytest.raises(BadRequest, match="lora_path must be a loaded adapter, b@7, b@8, got 'a'"):
        answer(shared, "a")


def test_versions_of_all_names_have_one_bound(shared: Scheduler) -> None:
    load(shared, update_of(tensors_of(shared, 3), name="c", version="1"))
    # A job that keeps as many as before may always send the next one.
    load(shared, update_of(tensors_of(shared, 4), name="b", version="9", num_kept=2))
    assert shared.adapters.loaded() == {"a": ["7"], "b": ["8", "9"], "c": ["1"]}
    with pytest.raises(Refused, match="must have at most 4 versions on this server, got 3 of other names; unload one"):
        load(shared, update_of(tensors_of(shared, 5), name="a", version="8", num_kept=2))
    assert shared.adapters.loaded()["a"] == ["7"]


def test_requests_name_an_adapter(shared: Scheduler) -> None:
    with pytest.raises(
        BadRequest, match="lora_path must name an adapter on this server, whose base several jobs share"
    ):
        answer(shared)


def test_an_abort_of_one_adapter_leaves_the_requests_of_the_other(shared: Scheduler) -> None:
    expected = answer(shared, "b")
    shared.call(lambda: shared.pause("in_place")).result(timeout=60)
    futures = {
        name: shared.submit(replace(make_request(PROMPT, **GREEDY), adapter=f"{name}@{version}"))
        for name, version in (("a", 7), ("b", 8))
    }
    shared.call(lambda: shared.abort(None, adapter="a")).result(timeout=60)
    shared.call(shared.resume).result(timeout=60)
    (ended,), (other,) = (futures[name].result(timeout=60) for name in "ab")
    assert ended.finish_reason is not None and ended.finish_reason["type"] == "abort"
    assert (other.output_ids, other.logprobs) == (expected.output_ids, expected.logprobs)


CALLS: dict[str, Callable[[EmbeddedService], Coroutine[Any, Any, None]]] = {
    "abort_request of all requests": lambda service: service.abort(None),
    "pause_generation": lambda service: service.pause("retract"),
    "begin_weight_update": lambda service: service.begin_update(),
    "release_memory_occupation": lambda service: service.release_memory(["weights"]),
    "update_weight_version": lambda service: service.set_version("3", abort_all=False),
    "update_weights_from_disk": lambda service: service.load_folder(
        FolderUpdate(folder=Path("none"), load_format=None, flush=True, version=None, abort_all=False, checksums={})
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls_that_change_or_stop_the_other_jobs_are_refused(shared: Scheduler, name: str) -> None:
    service = EmbeddedService(shared, Limits(vocab_size=64, max_context_len=64), facts={})
    with pytest.raises(Refused, match=f"{name} must not be called on a server whose base several jobs share"):
        await CALLS[name](service)
    assert (await service.info())["adapters"] == {"a": ["7"], "b": ["7", "8"]}


def test_a_compact_batch_computes_the_adapters_of_all_jobs_at_once(open_scheduler: OpenScheduler) -> None:
    """The rows of jobs whose adapters have different layers, next to each other, as each of them alone."""
    scheduler = open_scheduler(deterministic=False, max_adapters=4)
    layers = {"a": LAYERS, "b": LAYERS[:1], "c": ("model.layers.0.self_attn.k_proj", LAYERS[2])}
    for seed, (name, own) in enumerate(layers.items()):
        load(scheduler, update_of(tensors_of(scheduler, seed, layers=own), name=name))
    alone = {name: answer(scheduler, name) for name in layers}
    scheduler.call(lambda: scheduler.pause("retract")).result(timeout=60)
    futures = {name: scheduler.submit(replace(make_request(PROMPT, **GREEDY), adapter=name)) for name in layers}
    scheduler.call(scheduler.resume).result(timeout=60)
    for name, expected in alone.items():
        (got,) = futures[name].result(timeout=60)
        assert got.output_ids == expected.output_ids
        assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert len({tuple(each.output_ids) for each in alone.values()}) == 3


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_job_that_diverged_does_not_end_the_requests_of_another(
    open_scheduler: OpenScheduler, deterministic: bool
) -> None:
    scheduler = open_scheduler(deterministic=deterministic, max_adapters=4)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors_of(scheduler, 0).items()}
    load(scheduler, update_of(broken, name="a"))
    load(scheduler, update_of(tensors_of(scheduler, 1), name="b"))
    expected = answer(scheduler, "b")
    scheduler.call(lambda: scheduler.pause("retract")).result(timeout=60)
    futures = [scheduler.submit(replace(make_request(PROMPT, **GREEDY), adapter=name)) for name in "ab"]
    scheduler.call(scheduler.resume).result(timeout=60)
    with pytest.raises(Refused, match="logprobs must be finite"):
        futures[0].result(timeout=60)
    (got,) = futures[1].result(timeout=60)
    assert got.output_ids == expected.output_ids
    assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_a_stack_is_kept_while_it_has_all_adapters_and_few_others(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler(max_adapters=4)
    for seed, name in enumerate("abcd"):
        load(scheduler, update_of(tensors_of(scheduler, seed), name=name))
    found = {name: scheduler.adapters.find(name) for name in "abcd"}
    a, b, c, d = (each for each in found.values() if each is not None)
    stacks = AdapterStacks()
    full = stacks.find([a, b, c, d])
    assert full is not None and stacks.find([d, b]) is full
    larger = AdapterStack([a, b, c, d, replace(a, version="2")])
    assert larger.ranks("model.layers.1.mlp.down_proj") == (RANK,) * 5
    stacks.find([c, d, replace(b, version="2")])
    assert stacks.find([a, b]) is not full, "its adapters are no longer there"
    assert stacks.find([a, replace(b, scale=9.0)]) is None, "one scale for all rows"
