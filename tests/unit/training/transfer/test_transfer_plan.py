"""Transfer plans for layouts of up to 64 ranks."""

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest

from rlscale.training.transfer.transfer_plan import (
    TransferPlan,
    WeightSpec,
    balanced_owners,
    fewest_owners,
    plan_transfer,
)

LAYERS, EXPERTS, BUCKET = 4, 8, 1000


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. A stage has copies of its layers, and each copy is divided into tensor-parallel parts."""

    tp: int = 1
    pp: int = 1
    copies: int = 1  # data and context parallelism
    ep: int = 1
    etp: int = 1

    def stage(self, layer: int) -> int:
        return layer * self.pp // LAYERS

    def weights(self) -> list[WeightSpec]:
        found = [WeightSpec(name="embedding", num_shards=self.tp, shard_bytes=1600 // self.tp)]
        for i in range(LAYERS):
            found.append(WeightSpec(name=f"{i}.norm", num_shards=1, shard_bytes=12))
            found.append(WeightSpec(name=f"{i}.attention", num_shards=self.tp, shard_bytes=400 // self.tp))
            found += [
                WeightSpec(name=f"{i}.expert.{j}", num_shards=self.etp, shard_bytes=200 // self.etp)
                for j in range(EXPERTS)
            ]
        return found

    def shards(self) -> list[dict[str, int]]:
        ranks = []
        for stage, copy, tensor in product(range(self.pp), range(self.copies), range(self.tp)):
            place = copy * self.tp + tensor  # within the stage, which experts divide independently
            expert_tensor, expert = place % self.etp, place // self.etp % self.ep
            own = {"embedding": tensor} if stage == 0 else {}
            for i in range(LAYERS):
                if self.stage(i) == stage:
                    share = EXPERTS // self.ep
                    own |= {f"{i}.norm": 0, f"{i}.attention": tensor}
                    own |= {f"{i}.expert.{j}": expert_tensor for j in range(expert * share, (expert + 1) * share)}
            ranks.append(own)
        return ranks


LAYOUTS = {
    "single": Layout(),
    "dp4": Layout(copies=4),
    "tp2": Layout(tp=2, etp=2),
    "pp4": Layout(pp=4),
    "ep4": Layout(copies=4, ep=4),
    "ep2 etp2": Layout(tp=2, copies=2, ep=2, etp=2),
    "tp4 pp2 ep8": Layout(tp=4, pp=2, copies=4, ep=8),
    "tp4 pp4 ep4 etp2": Layout(tp=4, pp=4, copies=4, ep=4, etp=2),
}


CHOICES = {
    "single receiver": lambda weights, shards: [0] * len(weights),
    "balanced": balanced_owners,
    "few": fewest_owners,
}


def make_plan(layout: Layout, how: str) -> TransferPlan:
    weights, shards = layout.weights(), layout.shards()
    receivers = CHOICES[how](weights, shards)
    return plan_transfer(weights, shards, receivers=receivers, bucket_bytes=BUCKET)


CASES = [pytest.param(layout, how, id=f"{name}, {how}") for name, layout in LAYOUTS.items() for how in CHOICES]


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_every_shard_is_sent_once_by_a_rank_that_holds_it(layout: Layout, how: str) -> None:
    plan, shards = make_plan(layout, how), layout.shards()
    parts = Counter((each.weight_index, each.shard_index) for b in plan.buckets for p in b.buffers for each in p.slices)
    assert parts == Counter((i, part) for i, weight in enumerate(plan.weights) for part in range(weight.num_shards))
    for bucket in plan.buckets:
        for buffer in bucket.buffers:
            assert all(shards[buffer.sender][plan.weights[p.weight_index].name] == p.shard_index for p in buffer.slices)
            assert {p.weight_index for p in buffer.slices} <= set(bucket.weight_indices)


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_shards_do_not_overlap_in_a_message(layout: Layout, how: str) -> None:
    plan = make_plan(layout, how)
    for buffer in (buffer for bucket in plan.buckets for buffer in bucket.buffers):
        end = 0
        for each in buffer.slices:
            assert each.start >= end and each.start % 8 == 0
            end = each.start + plan.weights[each.weight_index].shard_bytes
        assert end <= buffer.num_bytes < end + 8


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_buckets_are_in_order_and_within_the_limit(layout: Layout, how: str) -> None:
    plan = make_plan(layout, how)
    for receiver in {bucket.receiver for bucket in plan.buckets}:
        own = [bucket for bucket in plan.buckets if bucket.receiver == receiver]
        assert [bucket.number for bucket in own] == list(range(len(own)))
        weights = [i for bucket in own for i in bucket.weight_indices]
        assert weights == sorted(weights)
        for bucket in own:
            assert (
                sum(plan.weights[i].num_bytes for i in bucket.weight_indices) <= BUCKET
                or len(bucket.weight_indices) == 1
            )
    if how == "single receiver":
        assert {bucket.receiver for bucket in plan.buckets} == {0}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_round_needs_at_most_one_bucket_in_and_one_out(layout: Layout) -> None:
    single = make_plan(layout, "single receiver")
    largest = max(weight.num_bytes for weight in single.weights)  # larger than a bucket
    slack = 8 * max(len(bucket.weight_indices) for bucket in single.buckets) * layout.tp
    assert all(single.peak_bytes(rank) <= largest + slack for rank in range(len(layout.shards())))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_with_the_same_shards_send_about_the_same(layout: Layout) -> None:
    plan, shards = make_plan(layout, "single receiver"), layout.shards()
    by_content: dict[frozenset[tuple[str, int]], list[int]] = {}
    for rank, own in enumerate(shards):
        by_content.setdefault(frozenset(own.items()), []).append(plan.sent_bytes(rank))
    assert plan.sent_bytes(0) == 0
    for own_bytes in by_content.values():
        others = own_bytes[1:] if own_bytes[0] == 0 else own_bytes  # rank 0 receives
        assert not others or max(others) - min(others) <= 1600 // layout.tp


@pytest.mark.parametrize("how", ["balanced", "few"])
@pytest.mark.parametrize("name", ["ep4", "ep2 etp2", "tp4 pp4 ep4 etp2"])
def test_whole_experts_are_not_sent_to_their_owners(name: str, how: str) -> None:
    layout = LAYOUTS[name]
    plan, shards = make_plan(layout, how), layout.shards()
    sent = [
        (plan.weights[each.weight_index], bucket.receiver)
        for bucket in plan.buckets
        for buffer in bucket.messages
        for each in buffer.slices
    ]
    assert bool(sent) == (name != "ep4")  # every rank of ep4 holds all that it owns
    for weight, receiver in sent:
        assert weight.name in shards[receiver]
        assert weight.num_shards > 1  # else the receiver holds all of it


@pytest.mark.parametrize("name", ["dp4", "ep4", "tp4 pp2 ep8"])
def test_balanced_owners_get_about_the_same(name: str) -> None:
    layout = LAYOUTS[name]
    weights, shards = layout.weights(), layout.shards()
    given = Counter[int]()
    for weight, rank in zip(weights, balanced_owners(weights, shards), strict=True):
        given[rank] += weight.num_bytes
    stages = [range(s * len(shards) // layout.pp, (s + 1) * len(shards) // layout.pp) for s in range(layout.pp)]
    for stage in stages:
        assert max(given[rank] for rank in stage) - min(given[rank] for rank in stage) <= 1600


@pytest.mark.parametrize(
    ("name", "senders"),
    [
        ("single", [0]),
        ("dp4", [0]),
        ("tp2", [0]),
        ("pp4", [0, 1, 2, 3]),
        ("ep4", [0, 1, 2, 3]),
        ("ep2 etp2", [0, 2]),
        ("tp4 pp2 ep8", list(range(0, 8)) + list(range(16, 24))),
    ],
)
def test_fewest_owners_hold_everything(name: str, senders: list[int]) -> None:
    plan = make_plan(LAYOUTS[name], "few")
    assert list(plan.receivers) == senders
    total = sum(weight.num_bytes for weight in plan.weights)
    assert sum(plan.received_bytes(rank) for rank in senders) == total
    assert plan.received_bytes(63) == 0
    if "pp" not in name:  # in one stage the owners differ by at most one weight
        assert max(map(plan.received_bytes, senders)) - min(map(plan.received_bytes, senders)) <= 1600


def test_a_shard_that_no_rank_holds_is_an_internal_error() -> None:
    weights = [WeightSpec(name="a", num_shards=2, shard_bytes=4)]
    with pytest.raises(AssertionError, match="no rank holds shard 1 of a"):
        plan_transfer(weights, [{"a": 0}], receivers=[0], bucket_bytes=8)
