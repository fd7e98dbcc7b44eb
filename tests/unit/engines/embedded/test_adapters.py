"""Low-rank adapters in the embedded engine: per row, pinned by requests, and refused where they do not fit."""

import base64
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.engines.embedded.adapter_store import AdapterStore
from rlscale.engines.embedded.row_adapters import RowAdapters
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.server.generate_request import Answer, BadRequest
from rlscale.errors import WeightSyncError
from rlscale.weight_types import AdapterUpdate
from tests.unit.engines.embedded.conftest import OpenScheduler, make_request

PROMPT = [5, 9, 33, 7]
RANK, ALPHA = 3, 12
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def tensors_of(scheduler: Scheduler, seed: int, *, layers: tuple[str, ...] = LAYERS) -> dict[str, Tensor]:
    """A random adapter that changes the model clearly, under peft's names."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer in layers:
        rows, columns = scheduler._decoder.weights[f"{layer}.weight"].shape
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            found[f"base_model.model.{layer}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.2
    return found


def update_of(tensors: dict[str, Tensor], *, version: str = "1", **changes: Any) -> AdapterUpdate:
    update = AdapterUpdate(
        name="policy",
        version=version,
        config={"r": RANK, "lora_alpha": ALPHA},
        payload=base64.b64encode(save(tensors)).decode(),
        checksums={name: checksum(tensor) for name, tensor in tensors.items()},
    )
    return replace(update, **changes)


def load(scheduler: Scheduler, update: AdapterUpdate) -> None:
    scheduler.call(lambda: scheduler.adapters.load(update)).result(timeout=60)


def merge(scheduler: Scheduler, tensors: dict[str, Tensor]) -> None:
    """Adds alpha / rank * B A to the weights, as an export does."""

    def change() -> None:
        for layer in {name.removeprefix("base_model.model.").split(".lora_")[0] for name in tensors}:
            a, b = (tensors[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
            scheduler._decoder.weights[f"{layer}.weight"].add_(ALPHA / RANK * (b @ a))

    scheduler.call(change).result(timeout=60)


def answer(scheduler: Scheduler, adapter: str | None = None, prompt: list[int] = PROMPT) -> Answer:
    request = replace(make_request(prompt, **GREEDY), adapter=adapter)
    return scheduler.submit(request).result(timeout=60)[0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_adapter_generates_as_the_merged_weights(open_scheduler: OpenScheduler, deterministic: bool) -> None:
    adapted, merged = open_scheduler(deterministic=deterministic), open_scheduler(deterministic=deterministic)
    tensors = tensors_of(adapted, 0)
    base = answer(adapted)
    load(adapted, update_of(tensors))
    merge(merged, tensors)
    got, expected = answer(adapted), answer(merged)
    # Twice alpha / rank, or none at all, would change the first logprob by far more.
    assert got.output_ids == expected.output_ids != base.output_ids
    assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert abs(got.logprobs[0] - base.logprobs[0]) > 1e-2


def test_neighbours_with_other_adapters_do_not_change_a_bit(open_scheduler: OpenScheduler) -> None:
    """Equal prompts share a prefill within a request only: a prefix belongs to the adapter that computed it."""
    scheduler = open_scheduler()
    for seed, name in enumerate(("policy", "second", "third")):
        load(scheduler, update_of(tensors_of(scheduler, seed), name=name))
    alone = {name: answer(scheduler, name) for name in ("policy", "second", "third")}
    scheduler.call(lambda: scheduler.pause("retract")).result(timeout=60)
    futures = {
        name: scheduler.submit(replace(make_request(PROMPT, **GREEDY), adapter=name)) for name in reversed(alone)
    }
    scheduler.call(scheduler.resume).result(timeout=60)
    together = {name: future.result(timeout=60)[0] for name, future in futures.items()}
    for name, expected in alone.items():
        assert together[name].output_ids == expected.output_ids
        assert together[name].logprobs == expected.logprobs, "batch invariance"
    assert len({tuple(each.output_ids) for each in alone.values()}) == 3


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_keeps_the_version_that_it_began_with(open_scheduler: OpenScheduler, deterministic: bool) -> None:
    scheduler = open_scheduler(deterministic=deterministic)
    first, second = (update_of(tensors_of(scheduler, seed), version=str(seed)) for seed in (1, 2))
    load(scheduler, first)
    expected = [answer(scheduler)]
    load(scheduler, second)
    expected.append(answer(scheduler))
    load(scheduler, first)
    scheduler.call(lambda: scheduler.pause("retract")).result(timeout=60)
    old = scheduler.submit(make_request(PROMPT, **GREEDY))
    load(scheduler, second)  # while the request waits; engines may as well decode it
    new = scheduler.submit(make_request(PROMPT, **GREEDY))
    scheduler.call(scheduler.resume).result(timeout=60)
    for future, wanted, version in ((old, expected[0], "1"), (new, expected[1], "2")):
        got = future.result(timeout=60)[0]
        assert (got.output_ids, got.weight_version) == (wanted.output_ids, version)
        assert [span.version for span in got.spans] == [version]


def test_earlier_versions_can_be_named_as_long_as_they_are_kept(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    for version in (1, 2, 3):
        load(scheduler, update_of(tensors_of(scheduler, version), version=str(version), num_kept=2))
    assert scheduler.adapters.loaded() == {"policy": ["2", "3"]}
    assert answer(scheduler).output_ids == answer(scheduler, "policy@3").output_ids
    assert answer(scheduler, "policy@2").weight_version == "2"
    with pytest.raises(BadRequest, match=r"lora_path must be a loaded adapter, policy@2, policy@3, got 'policy@1'"):
        answer(scheduler, "policy@1")


def test_without_adapters_the_base_generates_again(open_scheduler: OpenScheduler) -> None:
    scheduler = open_scheduler()
    base = answer(scheduler)
    load(scheduler, update_of(tensors_of(scheduler, 0)))
    scheduler.call(lambda: scheduler.adapters.unload("policy")).result(timeout=60)
    assert answer(scheduler).logprobs == base.logprobs
    with pytest.raises(BadRequest, match="lora_name must be among"):
        scheduler.call(lambda: scheduler.adapters.unload("policy")).result(timeout=60)


def test_adapters_may_have_the_names_of_layers_in_transformers(open_scheduler: OpenScheduler) -> None:
    decoder = open_scheduler()._decoder
    known = [layer for projection in decoder.projections() for layer in projection.layers]
    aliases = {layer.replace("model.", "model.language_model.", 1): layer for layer in known}
    plain, renamed = (
        AdapterStore(
            list(decoder.projections()), dtype=decoder.dtype, device=decoder.device, checksum=None, aliases=names
        )
        for names in (None, aliases)
    )
    tensors = tensors_of(open_scheduler(), 0)
    plain.load(update_of(tensors))
    renamed.load(
        update_of({name.replace(".model.layers.", ".model.language_model.layers."): x for name, x in tensors.items()})
    )
    found, same = (each.find(None) for each in (renamed, plain))
    assert found is not None and same is not None and found.factors.keys() == same.factors.keys()
    assert all(torch.equal(found.factors[name].b_OR, same.factors[name].b_OR) for name in same.factors)


@pytest.fixture
def store(open_scheduler: OpenScheduler) -> tuple[AdapterStore, Scheduler]:
    scheduler = open_scheduler()
    decoder = scheduler._decoder
    made = AdapterStore(list(decoder.projections()), dtype=decoder.dtype, device=decoder.device, checksum=checksum)
    return made, scheduler


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": 0}, r"config_dict.lora_alpha must be a number above 0, got 0"),
        ({"r": 0}, r"config_dict.r must be an integer of at least 1, got 0"),
        ({"r": RANK + 1}, r"serialized_named_tensors must have shape \[4, 64\] for .*q_proj with rank 4"),
        ({"use_rslora": True}, r"config_dict.use_rslora must be unset on this server, got True"),
        ({"rank_pattern": {"q_proj": 8}}, r"config_dict.rank_pattern must be unset"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    store: tuple[AdapterStore, Scheduler], config: dict[str, Any], message: str
) -> None:
    update = update_of(tensors_of(store[1], 0), config={"r": RANK, "lora_alpha": ALPHA, **config})
    with pytest.raises(BadRequest, match=message):
        store[0].load(update)
    assert store[0].loaded() == {} and store[0].find(None) is None


def test_tensors_that_do_not_fit_or_arrive_changed_are_refused(store: tuple[AdapterStore, Scheduler]) -> None:
    adapters, scheduler = store
    tensors = tensors_of(scheduler, 0)
    name = next(iter(tensors))
    changed = update_of(tensors, checksums={**update_of(tensors).checksums, name: "0"})
    with pytest.raises(WeightSyncError, match=f"{name} must arrive with checksum 0, got"):
        adapters.load(changed)
    for wrong, message in (
        ({}, "contain A and B of each layer, got 'no tensors'"),
        ({name: tensors[name]}, "contain A and B of each layer"),
        ({name.replace("layers.0", "layers.9"): tensors[name]}, "contain A and B"),
        ({"lm_head.weight": tensors[name]}, "have names of the form"),
    ):
        with pytest.raises(BadRequest, match=message):
            adapters.load(update_of(wrong))
    stranger = {key.replace("layers.0", "layers.9"): value for key, value in tensors.items()}
    with pytest.raises(BadRequest, match="name linear layers of this model that may have adapters"):
        adapters.load(update_of(stranger))
    with pytest.raises(BadRequest, match="be base64 of the safetensors format"):
        adapters.load(update_of(tensors, payload="gASVAA=="))
    assert adapters.loaded() == {}


def test_rows_without_an_adapter_stay_as_they_are(store: tuple[AdapterStore, Scheduler]) -> None:
    adapters, scheduler = store
    adapters.load(update_of(tensors_of(scheduler, 0)))
    projection = next(iter(scheduler._decoder.projections()))
    x = torch.randn(4, projection.input_width)
    plain = projection(x)
    rows = RowAdapters.from_rows([None, adapters.find(None)], device=x.device, repeat=2)
    got = projection(x, rows)
    assert torch.equal(got[:2], plain[:2]) and not torch.isclose(got[2:], plain[2:]).all()
    # k_proj has no adapter: its rows between q_proj and v_proj do not change.
    keys = dict(projection.rows())["model.layers.0.self_attn.k_proj"]
    assert torch.equal(got[:, keys], plain[:, keys])
    assert RowAdapters.from_rows([None, None], device=x.device) is None
