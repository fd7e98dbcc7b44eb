"""Which actor sits on which GPU. Plain arithmetic, so that the plan can be shown without Ray."""

from dataclasses import dataclass

from rlscale.config import ClusterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Bundles of one placement group; a bundle is one GPU, or one slot that stands for it on a CPU.

    Trainer rank i owns bundle i. Engine j starts at `engine_bundles[j]` and spans `gpus_per_engine` bundles. Colocated
    engines lie on the trainers' bundles, separate ones behind them.
    """

    num_trainers: int
    num_engines: int
    gpus_per_engine: int
    colocate: bool

    @property
    def num_bundles(self) -> int:
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
