"""Bundles of trainers, engines and critics, and the nodes that Ray gives them."""

from dataclasses import replace

import pytest

from rlscale.config import ClusterConfig
from rlscale.errors import ConfigError
from rlscale.plan.placement import (
    Layout,
    build_cluster_layout,
    check_node_sizes,
    fill_nodes,
    order_bundles,
    place_actors,
    reorder_bundles,
)


def cluster(**values: object) -> ClusterConfig:
    return ClusterConfig(**{"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, **values})  # type: ignore[arg-type]


def processes(layout: Layout) -> list[tuple[tuple[int, ...], ...]]:
    return [layout.process_bundles(engine) for engine in range(layout.num_engines)]


def test_separate_engines_follow_the_trainers_with_one_bundle_a_process() -> None:
    layout = build_cluster_layout(cluster(rollout_num_gpus_per_engine=2), needs_engines=True)
    assert layout.bundle_sizes == (1, 1, 2, 2)
    assert (layout.num_gpus, layout.share) == (6, 1.0)
    assert processes(layout) == [((2,),), ((3,),)]


def test_colocated_engines_share_the_trainers_bundles() -> None:
    layout = build_cluster_layout(cluster(actor_num_nodes=2, colocate=True), needs_engines=True)
    assert (layout.num_bundles, layout.num_gpus, layout.share) == (4, 4, 0.5)
    assert processes(layout) == [((0,),), ((1,),), ((2,),), ((3,),)]


def test_an_engine_has_a_process_on_each_of_its_nodes() -> None:
    sizes = {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4, "num_gpus_per_node": 2}
    apart = build_cluster_layout(cluster(**sizes), needs_engines=True)
    assert (apart.num_processes(0), apart.bundle_sizes) == (2, (1, 1, 2, 2, 2, 2))
    assert processes(apart) == [((2,), (3,)), ((4,), (5,))]
    shared = build_cluster_layout(cluster(**sizes, actor_num_nodes=4, colocate=True), needs_engines=True)
    assert shared.bundle_sizes == (1,) * 8
    assert processes(shared) == [((0, 1), (2, 3)), ((4, 5), (6, 7))]


def test_a_run_that_generates_nothing_places_no_engines() -> None:
    layout = build_cluster_layout(cluster(), needs_engines=False)
    assert (layout.num_engines, layout.num_bundles) == (0, 2)


def test_a_dedicated_critic_follows_trainers_and_engines() -> None:
    apart = replace(build_cluster_layout(cluster(rollout_num_gpus_per_engine=2), needs_engines=True), num_critics=2)
    assert (apart.first_critic, apart.num_gpus, processes(apart)) == (4, 8, [((2,),), ((3,),)])
    shared = replace(build_cluster_layout(cluster(colocate=True), needs_engines=True), num_critics=1)
    assert (shared.first_critic, shared.num_bundles) == (4, 5)
    assert [place.actors for place in place_actors(shared, gpus_per_node=4, has_critic=True)][3:] == [
        ("engine 3",),
        ("critic rank 0",),
    ]


@pytest.mark.parametrize("colocate", [False, True])
def test_engines_of_a_judge_have_the_last_bundles(colocate: bool) -> None:
    base = build_cluster_layout(cluster(rollout_num_gpus_per_engine=2, colocate=colocate), needs_engines=True)
    layout = replace(base, num_critics=1, num_reward_engines=2, gpus_per_reward_engine=2)
    first = len(base.bundle_sizes) + 1
    assert layout.bundle_sizes == (*base.bundle_sizes, 1, 2, 2)
    assert (layout.first_critic, processes(layout)) == (first - 1, processes(base))
    assert processes(layout.reward_layout) == [((first,),), ((first + 1,),)]
    assert layout.reward_layout.share == 1.0
    actors = [place.actors for place in place_actors(layout, gpus_per_node=4)]
    assert actors.count(("reward engine 0",)) == actors.count(("reward engine 1",)) == 2
    assert not any("reward" in actor for each in actors if len(each) > 1 for actor in each)


def test_an_engine_of_a_judge_over_nodes_has_a_process_on_each() -> None:
    base = build_cluster_layout(cluster(num_gpus_per_node=4), needs_engines=True)
    layout = replace(base, num_reward_engines=1, gpus_per_reward_engine=8)
    assert layout.bundle_sizes[-2:] == (4, 4)
    assert processes(layout.reward_layout) == [((6,), (7,))]
    (problem,) = check_node_sizes(layout, [3, 3, 3, 3, 3])
    assert problem.path == "reward.engine.num_gpus_per_engine" and "2 x 4 GPUs of one node" in str(problem)


def test_the_gpus_of_a_process_are_on_one_node() -> None:
    layout = Layout(num_trainers=6, num_engines=2, gpus_per_engine=4, colocate=False)
    # The first node has two GPUs left, which is not enough for an engine.
    assert fill_nodes(layout, gpus_per_node=8)[5:] == [(0, range(5, 6)), (1, range(0, 4)), (1, range(4, 8))]
    assert [place.actors[0] for place in place_actors(layout, gpus_per_node=8) if place.node == 1] == (
        ["engine 0"] * 4 + ["engine 1"] * 4
    )


def test_a_critic_fills_a_gap_before_an_engine() -> None:
    layout = Layout(num_trainers=3, num_engines=1, gpus_per_engine=2, colocate=False, num_critics=1, gpus_per_node=4)
    places = place_actors(layout, gpus_per_node=4)
    assert [(place.node, place.gpu, place.actors[0]) for place in places[3:]] == [
        (0, 3, "critic rank 0"),
        (1, 0, "engine 0"),
        (1, 1, "engine 0"),
    ]


def test_ranks_of_one_node_are_consecutive() -> None:
    layout = Layout(num_trainers=3, num_engines=2, gpus_per_engine=2, colocate=False)
    # Bundles 0 to 2 have one GPU, 3 and 4 two.
    assert order_bundles(layout, ["b", "a", "b", "b", "a"]) == (1, 0, 2, 4, 3)


def test_a_colocated_engine_gets_the_node_that_it_fits() -> None:
    layout = Layout(num_trainers=7, num_engines=1, gpus_per_engine=4, colocate=True)
    # Node a has three GPUs and node b four: the engine shares those of ranks 0 to 3.
    order = order_bundles(layout, ["a", "b", "a", "b", "b", "a", "b"])
    assert order == (1, 3, 4, 6, 0, 2, 5)


def test_an_engine_across_nodes_is_refused() -> None:
    layout = Layout(num_trainers=8, num_engines=2, gpus_per_engine=4, colocate=True)
    with pytest.raises(ConfigError) as caught:
        order_bundles(layout, ["a"] * 6 + ["b"] * 2)
    assert str(caught.value.problems[0]).startswith(
        "cluster.rollout_num_gpus_per_engine must fit on the nodes, with 4 GPUs of each, got 6, 2 free GPUs on 2 "
        "nodes; "
        "wait until whole nodes are free (see `ray status`), or set it to 2"
    )
    assert order_bundles(replace(layout, num_engines=4, gpus_per_engine=2), ["a"] * 6 + ["b"] * 2) == tuple(range(8))


TWO_PER_NODE = Layout(num_trainers=7, num_engines=3, gpus_per_engine=2, colocate=True, gpus_per_node=2)
"""Engines on the bundles 0 and 1, 2 and 3, 4 and 5; bundle 6 has a rank without an engine."""


def reordered(now: str, layout: Layout = TWO_PER_NODE, *, before: str = "aabbbbb") -> tuple[int, ...] | None:
    return reorder_bundles(layout, tuple(range(layout.num_bundles)), list(before), list(now))


@pytest.mark.parametrize(
    ("now", "found"),
    [
        ("aabbbbb", (0, 1, 2, 3, 4, 5, 6)),
        ("aaccccc", (0, 1, 2, 3, 4, 5, 6)),
        # Ray has moved the bundles of both engines to both nodes.
        ("aacdcdc", (0, 1, 2, 4, 3, 5, 6)),
        ("aacdddd", (0, 1, 3, 4, 5, 6, 2)),
        # Bundles that stay are not given out again, also if the others get to their node.
        ("aaaabba", (0, 1, 2, 3, 4, 5, 6)),
        # Three nodes with one, one and three GPUs have room for one engine only.
        ("aacdeee", None),
    ],
)
def test_engines_of_a_dead_node_get_gpus_of_one_node_each(now: str, found: tuple[int, ...] | None) -> None:
    assert reordered(now) == found


def test_bundles_of_separate_engines_stay_their_own() -> None:
    layout = Layout(num_trainers=3, num_engines=2, gpus_per_engine=2, colocate=False, num_critics=1)
    # Trainers, engines and critic were on one node; trainers and critic may have each other's bundles.
    assert reordered("cdcefd", layout, before="bbbbbb") == (0, 2, 1, 3, 4, 5)


def test_an_engine_over_nodes_loses_one_of_them() -> None:
    layout = Layout(num_trainers=4, num_engines=1, gpus_per_engine=4, colocate=True, gpus_per_node=2)
    assert reorder_bundles(layout, (2, 3, 0, 1), list("bbaa"), list("bbcc")) == (2, 3, 0, 1)
    assert reorder_bundles(layout, (2, 3, 0, 1), list("bbaa"), list("bbcd")) is None


@pytest.mark.parametrize(
    ("size", "nodes", "found"),
    [
        (8, [8, 8], None),
        (8, [16], None),
        (1, [1] * 16, None),
        (16, [8, 8], None),
        (8, [8, 4, 4], "must fit on the nodes (2 x 8 GPUs of one node), got 3 nodes with 8, 4, 4 GPUs; set "),
        (16, [4] * 4, "or set it to 4"),
        (4, [6, 4, 4, 2], "or set it to 2"),
        (4, [3, 3, 3, 3, 3, 1], "or set it to 1"),
    ],
)
def test_nodes_that_are_too_small_for_engines_are_reported(size: int, nodes: list[int], found: str | None) -> None:
    layout = Layout(num_trainers=16, num_engines=16 // size, gpus_per_engine=size, colocate=True)
    problems = check_node_sizes(layout, nodes)
    assert (problems == []) == (found is None)
    assert found is None or found in str(problems[0])


def with_prefill(layout: Layout, number: int, gpus: int) -> Layout:
    """The layout whose first engines are prefill engines of another size."""
    return replace(layout, num_prefill_engines=number, gpus_per_prefill_engine=gpus)


def test_prefill_and_decode_engines_have_their_own_sizes() -> None:
    apart = with_prefill(Layout(num_trainers=2, num_engines=4, gpus_per_engine=4, colocate=False), 2, 2)
    assert apart.bundle_sizes == (1, 1, 2, 2, 4, 4)
    assert processes(apart) == [((2,),), ((3,),), ((4,),), ((5,),)]
    assert (apart.num_engine_gpus, apart.num_gpus, apart.num_decode_engines) == (12, 14, 2)
    shared = replace(apart, num_trainers=13, colocate=True, num_critics=1)
    assert shared.bundle_sizes == (1,) * 14 and shared.first_critic == 13
    assert processes(shared) == [((0, 1),), ((2, 3),), ((4, 5, 6, 7),), ((8, 9, 10, 11),)]
    places = place_actors(shared, gpus_per_node=8)
    assert [place.actors[1] for place in places if len(place.actors) > 1] == [
        *["prefill engine 0"] * 2,
        *["prefill engine 1"] * 2,
        *["decode engine 2"] * 4,
        *["decode engine 3"] * 4,
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (2, 4, [((1,),), ((2,),), ((3,), (4,)), ((5,), (6,))]),
        (4, 2, [((1,), (2,)), ((3,), (4,)), ((5,),), ((6,),)]),
        (4, 1, [((1,), (2,)), ((3,), (4,)), ((5,),), ((6,),)]),
    ],
)
def test_an_engine_of_each_size_has_a_process_on_each_of_its_nodes(
    prefill: int, decode: int, expected: list[tuple[tuple[int, ...], ...]]
) -> None:
    layout = Layout(num_trainers=1, num_engines=4, gpus_per_engine=decode, colocate=False, gpus_per_node=2)
    layout = with_prefill(layout, 2, prefill)
    assert processes(layout) == expected
    assert sum(layout.bundle_sizes) == 1 + 2 * prefill + 2 * decode


def test_colocated_engines_of_two_sizes_get_nodes_that_they_fit() -> None:
    layout = with_prefill(Layout(num_trainers=8, num_engines=3, gpus_per_engine=4, colocate=True), 2, 2)
    with pytest.raises(ConfigError, match=r"sglang.config must fit on the nodes.*set num_gpus_per_engine to 1"):
        order_bundles(layout, ["a"] * 3 + ["b"] * 5)
    assert order_bundles(layout, ["a", "b", "b", "a", "a", "a", "b", "b"]) == (0, 3, 4, 5, 1, 2, 6, 7)


def test_the_larger_processes_are_moved_first() -> None:
    layout = with_prefill(Layout(num_trainers=8, num_engines=3, gpus_per_engine=4, colocate=True), 2, 2)
    before, now = ["a"] * 8, ["b", "b", "c", "c", "c", "c", "d", "d"]
    # Of the new nodes only c has four GPUs.
    assert reorder_bundles(layout, range(8), before, now) == (0, 1, 6, 7, 2, 3, 4, 5)


def test_nodes_that_are_too_small_for_one_of_the_sizes_are_found() -> None:
    layout = with_prefill(Layout(num_trainers=1, num_engines=4, gpus_per_engine=4, colocate=False), 2, 2)
    assert check_node_sizes(layout, [6, 6]) == []
    (problem,) = check_node_sizes(layout, [4, 3, 3])
    assert problem.path == "sglang.config" and "(2 x 4 GPUs of one node)" in str(problem)
    assert problem.fix.endswith("or set num_gpus_per_engine to 2")
    (problem,) = check_node_sizes(layout, [5, 5, 1, 1])
    assert "(6 x 2 GPUs of one node)" in str(problem)
