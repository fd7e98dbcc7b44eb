"""Bundles of trainers, engines and critics."""

from dataclasses import replace

from rlscale.config import ClusterConfig
from rlscale.plan.placement import build_cluster_layout, place_actors


def cluster(**values: object) -> ClusterConfig:
    return ClusterConfig(**{"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, **values})  # type: ignore[arg-type]


def test_separate_engines_follow_the_trainers() -> None:
    layout = build_cluster_layout(cluster(rollout_num_gpus_per_engine=2), needs_engines=True)
    assert layout.num_bundles == 6
    assert layout.engine_bundles == (2, 4)
    assert layout.share == 1.0


def test_colocated_engines_share_the_trainers_bundles() -> None:
    layout = build_cluster_layout(cluster(actor_num_nodes=2, colocate=True), needs_engines=True)
    assert layout.num_bundles == 4
    assert layout.engine_bundles == (0, 1, 2, 3)
    assert layout.share == 0.5


def test_a_run_that_generates_nothing_places_no_engines() -> None:
    layout = build_cluster_layout(cluster(), needs_engines=False)
    assert (layout.num_engines, layout.num_bundles) == (0, 2)


def test_a_dedicated_critic_follows_trainers_and_engines() -> None:
    apart = replace(build_cluster_layout(cluster(rollout_num_gpus_per_engine=2), needs_engines=True), num_critics=2)
    assert (apart.first_critic, apart.num_bundles, apart.engine_bundles) == (6, 8, (2, 4))
    shared = replace(build_cluster_layout(cluster(colocate=True), needs_engines=True), num_critics=1)
    assert (shared.first_critic, shared.num_bundles) == (4, 5)
    assert [place.actors for place in place_actors(shared, gpus_per_node=4, has_critic=True)][3:] == [
        ("engine 3",),
        ("critic rank 0",),
    ]
