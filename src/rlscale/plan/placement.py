"""Placement of actors on GPUs. Plain arithmetic, so that a plan needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlscale.config import ClusterConfig, RunConfig
from rlscale.config.rules import has_critic_ranks, num_critic_ranks, uses_engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Bundles of one placement group; a bundle is one GPU, or on a CPU one slot instead of a GPU.

    Trainer rank i has bundle i. Engine j has `gpus_per_engine` bundles from `engine_bundles[j]`. Colocated engines use
    the bundles of the trainers, separate engines the bundles after them. A critic with dedicated GPUs comes last.
    """

    num_trainers: int
    num_engines: int
    gpus_per_engine: int
    colocate: bool
    num_critics: int = 0  # ranks of a critic with dedicated bundles

    @property
    def num_bundles(self) -> int:
        """Bundles of the whole run."""
        return self.first_critic + self.num_critics

    @property
    def first_critic(self) -> int:
        """The bundle of the critic's rank 0, after those of policy and engines."""
        rollout = self.num_engines * self.gpus_per_engine
        return max(self.num_trainers, rollout) if self.colocate else self.num_trainers + rollout

    @property
    def engine_bundles(self) -> tuple[int, ...]:
        """The first bundle of each engine."""
        first = 0 if self.colocate else self.num_trainers
        return tuple(first + j * self.gpus_per_engine for j in range(self.num_engines))

    @property
    def share(self) -> float:
        """Fraction of a bundle that an actor requests, so that a trainer and an engine fit into one."""
        return 0.5 if self.colocate else 1.0


def build_cluster_layout(config: ClusterConfig, *, needs_engines: bool) -> Layout:
    """The layout of a resolved group `cluster`; SFT without evaluation needs no engines."""
    rollout_gpus = config.rollout_num_gpus if needs_engines else 0
    assert rollout_gpus is not None, "the resolve step must set cluster.rollout_num_gpus"
    return Layout(
        num_trainers=config.actor_num_nodes * config.actor_num_gpus_per_node,
        num_engines=rollout_gpus // config.rollout_num_gpus_per_engine,
        gpus_per_engine=config.rollout_num_gpus_per_engine,
        colocate=config.colocate,
    )


def build_layout(config: RunConfig) -> Layout:
    """The layout of a run. Without a trainer the engines share no GPU."""
    layout = build_cluster_layout(config.cluster, needs_engines=uses_engines(config))
    if config.debug.rollout_only:
        return replace(layout, num_trainers=0, colocate=False)
    return replace(layout, num_critics=num_critic_ranks(config)) if has_critic_ranks(config) else layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A GPU and its actors, e.g. `("actor rank 3", "engine 1")`. Nodes and GPUs count from 0."""

    node: int
    gpu: int
    actors: tuple[str, ...]


def place_actors(layout: Layout, *, gpus_per_node: int, has_critic: bool = False) -> list[Place]:
    """The actors on each GPU if Ray fills node after node, as it does on equal, empty nodes.

    Args:
        layout: of the run.
        gpus_per_node: GPUs of a node, or slots on a CPU.
        has_critic: each trainer's GPU also has a rank of the critic, unless the critic has dedicated GPUs.
    """
    # Actors by bundle.
    on: list[list[str]] = [[] for _ in range(layout.num_bundles)]
    for rank in range(layout.num_trainers):
        on[rank].append(f"actor rank {rank}")
        if has_critic and not layout.num_critics:
            on[rank].append(f"critic rank {rank}")
    for rank in range(layout.num_critics):
        on[layout.first_critic + rank].append(f"critic rank {rank}")
    for engine, first in enumerate(layout.engine_bundles):
        for bundle in range(first, first + layout.gpus_per_engine):
            on[bundle].append(f"engine {engine}")
    return [
        Place(node=bundle // gpus_per_node, gpu=bundle % gpus_per_node, actors=tuple(actors))
        for bundle, actors in enumerate(on)
    ]
