"""Which actor sits on which GPU. Plain arithmetic, so that the plan can be shown without Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlscale.config import ClusterConfig, RunConfig
from rlscale.config.rules import has_critic_ranks, num_critic_ranks, uses_engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Bundles of one placement group; a bundle is one GPU, or one slot that stands for it on a CPU.

    Trainer rank i owns bundle i. Engine j starts at `engine_bundles[j]` and spans `gpus_per_engine` bundles. Colocated
    engines lie on the trainers' bundles, separate ones behind them. A critic with GPUs of its own is behind all others.
    """

    num_trainers: int
    num_engines: int
    gpus_per_engine: int
    colocate: bool
    num_critics: int = 0  # ranks of a critic with bundles of its own

    @property
    def num_bundles(self) -> int:
        return self.first_critic + self.num_critics

    @property
    def first_critic(self) -> int:
        """The bundle of the critic's rank 0; those of policy and engines are before it."""
        rollout = self.num_engines * self.gpus_per_engine
        return max(self.num_trainers, rollout) if self.colocate else self.num_trainers + rollout

    @property
    def engine_bundles(self) -> tuple[int, ...]:
        first = 0 if self.colocate else self.num_trainers
        return tuple(first + j * self.gpus_per_engine for j in range(self.num_engines))

    @property
    def share(self) -> float:
        """Part of a bundle that one actor claims, so that a trainer and an engine fit on one."""
        return 0.5 if self.colocate else 1.0


def plan_layout(config: ClusterConfig, *, needs_engines: bool) -> Layout:
    """The layout of a resolved config; SFT without evaluation needs no engines."""
    rollout_gpus = config.rollout_num_gpus if needs_engines else 0
    assert rollout_gpus is not None, "cluster.rollout_num_gpus is set by the resolve step"
    return Layout(
        num_trainers=config.actor_num_nodes * config.actor_num_gpus_per_node,
        num_engines=rollout_gpus // config.rollout_num_gpus_per_engine,
        gpus_per_engine=config.rollout_num_gpus_per_engine,
        colocate=config.colocate,
    )


def layout_of(config: RunConfig) -> Layout:
    """Who gets which GPU in a run; without a trainer, engines share with nobody."""
    layout = plan_layout(config.cluster, needs_engines=uses_engines(config))
    if config.debug.rollout_only:
        return replace(layout, num_trainers=0, colocate=False)
    return replace(layout, num_critics=num_critic_ranks(config)) if has_critic_ranks(config) else layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A GPU and who is on it, e.g. `("actor rank 3", "engine 1")`. Nodes and GPUs count from 0."""

    node: int
    gpu: int
    actors: tuple[str, ...]


def places(layout: Layout, *, gpus_per_node: int, has_critic: bool = False) -> list[Place]:
    """Where every actor is when Ray fills node after node, as it does on nodes that are alike and empty.

    Args:
        layout: of the run.
        gpus_per_node: GPUs, or on a CPU slots, of a node.
        has_critic: each trainer's GPU holds a rank of the critic too, unless that has GPUs of its own.
    """
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
