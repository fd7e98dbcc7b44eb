"""Who sends what to whom: as data, for layouts of up to 64 ranks."""

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest

from rlscale.training.megatron.transfer.transfer_plan import (
    TransferPlan,
    WeightSpec,
    balanced_owners,
    fewest_owners,
    plan_transfer,
)

LAYERS, EXPERTS, BUCKET = 4, 8, 1000


@dataclass(frozen=True)
class Layout:
    """Ranks of Megatron-core: stages, in each of them copies of the layers, in each of those tensor-parallel parts."""

    tp: int = 1
    pp: int = 1
    copies: int = 1  # data and context parallelism
    ep: int = 1
    etp: int = 1

    def stage(self, layer: int) -> int:
        return layer * self.pp // LAYERS

    def wanted(self) -> list[WeightSpec]:
        found = [WeightSpec(name="embedding", num_shards=self.tp, shard_bytes=1600 // self.tp)]
        for i in range(LAYERS):
            found.append(WeightSpec(name=f"{i}.norm", num_shards=1, shard_bytes=12))
            found.append(WeightSpec(name=f"{i}.attention", num_shards=self.tp, shard_bytes=400 // self.tp))
            found += [
                WeightSpec(name=f"{i}.expert.{j}", num_shards=self.etp, shard_bytes=200 // self.etp)
                for j in range(EXPERTS)
            ]
        return found

    def held(self) -> list[dict[str, int]]:
        ranks = []
        for stage, copy, tensor in product(range(self.pp), range(self.copies), range(self.tp)):
            place = copy * self.tp + tensor  # within the stage, which experts divide anew
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
    "alone": Layout(),
    "dp4": Layout(copies=4),
    "tp2": Layout(tp=2, etp=2),
    "pp4": Layout(pp=4),
    "ep4": Layout(copies=4, ep=4),
    "ep2 etp2": Layout(tp=2, copies=2, ep=2, etp=2),
    "tp4 pp2 ep8": Layout(tp=4, pp=2, copies=4, ep=8),
    "tp4 pp4 ep4 etp2": Layout(tp=4, pp=4, copies=4, ep=4, etp=2),
}


CHOICES = {"on one": lambda wanted, held: [0] * len(wanted), "spread": balanced_owners, "few": fewest_owners}


def planned(layout: Layout, how: str) -> TransferPlan:
    wanted, held = layout.wanted(), layout.held()
    receivers = CHOICES[how](wanted, held)
    return plan_transfer(wanted, held, receivers=receivers, bucket_bytes=BUCKET)


CASES = [pytest.param(layout, how, id=f"{name}, {how}") for name, layout in LAYOUTS.items() for how in CHOICES]


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_every_part_comes_once_from_a_rank_that_holds_it(layout: Layout, how: str) -> None:
    plan, held = planned(layout, how), layout.held()
    parts = Counter(
        (piece.weight_index, piece.shard_index) for b in plan.buckets for p in b.buffers for piece in p.slices
    )
    assert parts == Counter((i, part) for i, weight in enumerate(plan.weights) for part in range(weight.num_shards))
    for bucket in plan.buckets:
        for parcel in bucket.buffers:
            assert all(held[parcel.sender][plan.weights[p.weight_index].name] == p.shard_index for p in parcel.slices)
            assert {p.weight_index for p in parcel.slices} <= set(bucket.weight_indices)


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_parts_lie_apart_in_a_message(layout: Layout, how: str) -> None:
    plan = planned(layout, how)
    for parcel in (parcel for bucket in plan.buckets for parcel in bucket.buffers):
        end = 0
        for piece in parcel.slices:
            assert piece.start >= end and piece.start % 8 == 0
            end = piece.start + plan.weights[piece.weight_index].shard_bytes
        assert end <= parcel.num_bytes < end + 8


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_buckets_are_in_order_and_no_larger_than_asked(layout: Layout, how: str) -> None:
    plan = planned(layout, how)
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
    if how == "on one":
        assert {bucket.receiver for bucket in plan.buckets} == {0}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_messages_of_a_round_take_a_bucket_in_and_one_out_at_most(layout: Layout) -> None:
    on_one = planned(layout, "on one")
    largest = max(weight.num_bytes for weight in on_one.weights)  # which is more than a bucket
    slack = 8 * max(len(bucket.weight_indices) for bucket in on_one.buckets) * layout.tp
    assert all(on_one.peak_bytes(rank) <= largest + slack for rank in range(len(layout.held())))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_with_the_same_parts_send_alike(layout: Layout) -> None:
    plan, held = planned(layout, "on one"), layout.held()
    by_content: dict[frozenset[tuple[str, int]], list[int]] = {}
    for rank, own in enumerate(held):
        by_content.setdefault(frozenset(own.items()), []).append(plan.sent_bytes(rank))
    assert plan.sent_bytes(0) == 0
    for own_bytes in by_content.values():
        others = own_bytes[1:] if own_bytes[0] == 0 else own_bytes  # rank 0 receives
        assert not others or max(others) - min(others) <= 1600 // layout.tp


@pytest.mark.parametrize("how", ["spread", "few"])
@pytest.mark.parametrize("name", ["ep4", "ep2 etp2", "tp4 pp4 ep4 etp2"])
def test_experts_that_stay_with_their_owners_are_not_sent(name: str, how: str) -> None:
    layout = LAYOUTS[name]
    plan, held = planned(layout, how), layout.held()
    for bucket in plan.buckets:
        for parcel in bucket.messages:
            for piece in parcel.slices:
                weight = plan.weights[piece.weight_index]
                assert weight.name in held[bucket.receiver]
                assert weight.num_shards > 1  # else the receiver has all of it


@pytest.mark.parametrize("name", ["dp4", "ep4", "tp4 pp2 ep8"])
def test_owners_get_about_as_much(name: str) -> None:
    layout = LAYOUTS[name]
    wanted, held = layout.wanted(), layout.held()
    given = Counter[int]()
    for weight, rank in zip(wanted, balanced_owners(wanted, held), strict=True):
        given[rank] += weight.num_bytes
    stages = [range(s * len(held) // layout.pp, (s + 1) * len(held) // layout.pp) for s in range(layout.pp)]
    for stage in stages:
        assert max(given[rank] for rank in stage) - min(given[rank] for rank in stage) <= 1600


@pytest.mark.parametrize(
    ("name", "senders"),
    [
        ("alone", [0]),
        ("dp4", [0]),
        ("tp2", [0]),
        ("pp4", [0, 1, 2, 3]),
        ("ep4", [0, 1, 2, 3]),
        ("ep2 etp2", [0, 2]),
        ("tp4 pp2 ep8", list(range(0, 8)) + list(range(16, 24))),
    ],
)
def test_as_few_owners_as_hold_everything(name: str, senders: list[int]) -> None:
    plan = planned(LAYOUTS[name], "few")
    assert list(plan.receivers) == senders
    total = sum(weight.num_bytes for weight in plan.weights)
    assert sum(plan.received_bytes(rank) for rank in senders) == total
    assert plan.received_bytes(63) == 0
    if "pp" not in name:  # of one stage all are about equal: none has more than the others by more than one weight
        assert max(map(plan.received_bytes, senders)) - min(map(plan.received_bytes, senders)) <= 1600


def test_a_part_that_nobody_holds_is_a_mistake_of_ours() -> None:
    wanted = [WeightSpec(name="a", num_shards=2, shard_bytes=4)]
    with pytest.raises(AssertionError, match="no rank holds shard 1 of a"):
        plan_transfer(wanted, [{"a": 0}], receivers=[0], bucket_bytes=8)
