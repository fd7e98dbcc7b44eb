"""Placement of actors on GPUs. Plain arithmetic, so that a plan needs no Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlscale.config import ClusterConfig, RunConfig
from rlscale.config.rules import frozen_models, has_critic_ranks, num_critic_ranks, server_groups, uses_engines
from rlscale.config.server_groups import ServerRole
from rlscale.errors import ConfigError, Problem, count_noun


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenLayout:
    """Engines of a further model whose weights stay as they are."""

    name: str
    num_engines: int
    gpus_per_engine: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Bundles of one placement group: those of the trainers, then of separate engines, of a separate critic, of the
    engines of a judge or reward model, and of those of each further model.

    A bundle is one GPU, or on a CPU one slot instead of a GPU; trainer rank i has bundle i. An engine has a process on
    each of its nodes. Colocated engines use the bundles of the trainers, in their order. A process of a separate engine
    has one bundle with all its GPUs, which Ray therefore keeps on one node.
    """

    num_trainers: int
    num_engines: int
    gpus_per_engine: int
    colocate: bool
    num_critics: int = 0  # ranks of a critic with dedicated bundles
    gpus_per_node: int = 8
    num_reward_engines: int = 0
    gpus_per_reward_engine: int = 1
    frozen: tuple[FrozenLayout, ...] = ()
    num_prefill_engines: int | None = None  # the first ones; the others decode. None: every engine does both
    gpus_per_prefill_engine: int | None = None  # None: `gpus_per_engine`, as of all others

    def engine_gpus(self, engine: int) -> int:
        """GPUs of an engine."""
        is_prefill = engine < (self.num_prefill_engines or 0)
        return (is_prefill and self.gpus_per_prefill_engine) or self.gpus_per_engine

    def process_gpus(self, engine: int) -> int:
        """GPUs of an engine on one of its nodes."""
        return min(self.engine_gpus(engine), self.gpus_per_node)

    def num_processes(self, engine: int) -> int:
        """Nodes of an engine, each with one process."""
        return -(-self.engine_gpus(engine) // self.process_gpus(engine))

    @property
    def num_engine_gpus(self) -> int:
        """GPUs of all engines of the policy."""
        return sum(map(self.engine_gpus, range(self.num_engines)))

    @property
    def num_decode_engines(self) -> int:
        """Engines that generate: all but the prefill engines."""
        return self.num_engines - (self.num_prefill_engines or 0)

    @property
    def bundle_sizes(self) -> tuple[int, ...]:
        """GPUs of each bundle."""
        if self.colocate:
            policy = (1,) * max(self.num_trainers, self.num_engine_gpus)
        else:
            policy = (1,) * self.num_trainers + _engine_bundles(self)
        sizes = policy + (1,) * self.num_critics
        if self.num_reward_engines:
            sizes += _engine_bundles(self.reward_layout)
        for number in range(len(self.frozen)):
            sizes += _engine_bundles(self.frozen_layout(number))
        return sizes

    @property
    def num_bundles(self) -> int:
        """Bundles of the whole run."""
        return len(self.bundle_sizes)

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run, or slots on a CPU."""
        return sum(self.bundle_sizes)

    @property
    def first_critic(self) -> int:
        """The bundle of the critic's rank 0, after those of policy and engines."""
        return self._num_policy_bundles

    @property
    def reward_layout(self) -> Layout:
        """The layout whose engines are those of the judge: bundles of other processes stand for trainers."""
        first = self._num_policy_bundles + self.num_critics
        return self._separate(first, self.num_reward_engines, self.gpus_per_reward_engine)

    def frozen_layout(self, number: int) -> Layout:
        """The layout whose engines are those of a further model, in the same way."""
        first = len(replace(self, frozen=self.frozen[:number]).bundle_sizes)
        return self._separate(first, self.frozen[number].num_engines, self.frozen[number].gpus_per_engine)

    def _separate(self, first: int, num_engines: int, gpus_per_engine: int) -> Layout:
        """Engines on bundles from `first` on."""
        return Layout(
            num_trainers=first,
            num_engines=num_engines,
            gpus_per_engine=gpus_per_engine,
            colocate=False,
            gpus_per_node=self.gpus_per_node,
        )

    @property
    def _num_policy_bundles(self) -> int:
        """Bundles of trainers and engines."""
        if self.colocate:
            return max(self.num_trainers, self.num_engine_gpus)
        return self.num_trainers + len(_engine_bundles(self))

    def engine_kind(self, engine: int) -> str:
        """Name of an engine of the policy in a plan, without its number."""
        if self.num_prefill_engines is None:
            return "engine"
        return "prefill engine" if engine < self.num_prefill_engines else "decode engine"

    @property
    def share(self) -> float:
        """Fraction of a bundle that an actor requests, so that a trainer and an engine fit into one."""
        return 0.5 if self.colocate else 1.0

    def process_bundles(self, engine: int) -> tuple[tuple[int, ...], ...]:
        """The bundles of each process of an engine, in the order of its ranks."""
        number, size = self.num_processes(engine), self.process_gpus(engine)
        # All engines before this one have its size, or are prefill engines of another one.
        prefill = min(engine, self.num_prefill_engines or 0)
        if not self.colocate:
            first = self.num_trainers + prefill * self.num_processes(0) + (engine - prefill) * number
            return tuple((first + process,) for process in range(number))
        first = prefill * self.engine_gpus(0) + (engine - prefill) * self.engine_gpus(engine)
        return tuple(tuple(range(first + i * size, first + (i + 1) * size)) for i in range(number))


def _engine_bundles(layout: Layout) -> tuple[int, ...]:
    """Sizes of the bundles of separate engines."""
    engines = range(layout.num_engines)
    return tuple(layout.process_gpus(engine) for engine in engines for _ in range(layout.num_processes(engine)))


def build_cluster_layout(config: ClusterConfig, *, needs_engines: bool) -> Layout:
    """The layout of a resolved group `cluster`; SFT without evaluation needs no engines."""
    rollout_gpus = config.rollout_num_gpus if needs_engines else 0
    assert rollout_gpus is not None, "the resolve step must set cluster.rollout_num_gpus"
    return Layout(
        num_trainers=config.actor_num_nodes * config.actor_num_gpus_per_node,
        num_engines=rollout_gpus // config.rollout_num_gpus_per_engine,
        gpus_per_engine=config.rollout_num_gpus_per_engine,
        colocate=config.colocate,
        gpus_per_node=config.num_gpus_per_node,
    )


def build_layout(config: RunConfig) -> Layout:
    """The layout of a run. Without a trainer the engines share no GPU."""
    layout = build_cluster_layout(config.cluster, needs_engines=uses_engines(config))
    judge = config.reward.engine
    if judge.num_gpus and uses_engines(config):
        number, size = judge.num_gpus // judge.num_gpus_per_engine, judge.num_gpus_per_engine
        layout = replace(layout, num_reward_engines=number, gpus_per_reward_engine=size)
    frozen = tuple(
        FrozenLayout(
            name=name,
            num_engines=each.num_gpus // each.num_gpus_per_engine,
            gpus_per_engine=each.num_gpus_per_engine,
        )
        for name, each in frozen_models(config).items()
    )
    layout = _with_groups(replace(layout, frozen=frozen), config)
    if config.debug.rollout_only:
        return replace(layout, num_trainers=0, colocate=False)
    return replace(layout, num_critics=num_critic_ranks(config)) if has_critic_ranks(config) else layout


def engine_layout(layout: Layout) -> Layout:
    """The engines of a layout on a separate placement group, as the jobs of a sweep share them."""
    return Layout(
        num_trainers=0,
        num_engines=layout.num_engines,
        gpus_per_engine=layout.gpus_per_engine,
        colocate=False,
        gpus_per_node=layout.gpus_per_node,
    )


def _with_groups(layout: Layout, config: RunConfig) -> Layout:
    """The layout with prefill and decode engines, if the run separates them."""
    groups = {group.role: group for group in server_groups(config)}
    if not groups:
        return layout
    prefill, decode = groups[ServerRole.prefill], groups[ServerRole.decode]
    is_equal = prefill.num_gpus_per_engine == decode.num_gpus_per_engine
    return replace(
        layout,
        num_engines=prefill.num_engines + decode.num_engines,
        gpus_per_engine=decode.num_gpus_per_engine,
        num_prefill_engines=prefill.num_engines,
        gpus_per_prefill_engine=None if is_equal else prefill.num_gpus_per_engine,
    )


def order_bundles(layout: Layout, nodes: Sequence[str]) -> tuple[int, ...]:
    """The placed bundle that each bundle of the layout uses, so that ranks of one node are consecutive.

    Args:
        layout: of the run.
        nodes: node of each placed bundle, which has the size of the layout's bundle at the same position.

    Raises:
        ConfigError: the GPUs of a process of a colocated engine are not on one node.
    """
    sizes = layout.bundle_sizes
    counts = Counter(node for node, size in zip(nodes, sizes, strict=True) if size == 1)
    part = max(map(layout.process_gpus, range(layout.num_engines)), default=1) if layout.colocate else 1
    # Nodes whose GPUs engines can use completely come first: the last ranks have no engine if there are fewer engines.
    order = sorted(range(len(nodes)), key=lambda i: (counts[nodes[i]] % part != 0, nodes[i], i))
    placed = {size: iter([i for i in order if sizes[i] == size]) for size in set(sizes)}
    found = tuple(next(placed[size]) for size in sizes)
    for engine in range(layout.num_engines):
        for bundles in layout.process_bundles(engine):
            if len({nodes[found[bundle]] for bundle in bundles}) > 1:
                raise ConfigError([_split_engine(layout, len(bundles), list(counts.values()))])
    return found


def reorder_bundles(
    layout: Layout, order: Sequence[int], before: Sequence[str], now: Sequence[str]
) -> tuple[int, ...] | None:
    """The placed bundle that each bundle of the layout uses after Ray has moved the bundles of dead nodes.

    Ray moves every bundle by itself, so the GPUs of a process may get to several nodes. The moved bundles are given out
    again, first to processes of colocated engines, which need one node each. All others keep their rank or engine,
    whose actors may live.

    Args:
        layout: of the run.
        order: the placed bundles in use, see `order_bundles`.
        before: node of each placed bundle when it was given out.
        now: its node now.

    Returns: None if the processes do not fit on the nodes.
    """
    moved = {bundle: placed for bundle, placed in enumerate(order) if before[placed] != now[placed]}
    found = dict(enumerate(order))
    # A process of a separate engine has one bundle, which stays its own. A colocated one was on one node that died.
    processes = [process for e in range(layout.num_engines) for process in layout.process_bundles(e)]
    shared = [process for process in processes if layout.colocate and set(process) <= moved.keys()]
    shared.sort(key=len, reverse=True)  # the smaller ones fit between the larger ones
    in_shared = {bundle for process in shared for bundle in process}
    singles = [bundle for bundle in moved if bundle not in in_shared and layout.bundle_sizes[bundle] == 1]
    free: dict[str, list[int]] = {}
    for placed in sorted(moved[bundle] for bundle in [*in_shared, *singles]):
        free.setdefault(now[placed], []).append(placed)
    for process in shared:
        node = next((node for node in sorted(free) if len(free[node]) >= len(process)), None)
        if node is None:
            return None
        found |= {bundle: free[node].pop(0) for bundle in process}
    left = [placed for node in sorted(free) for placed in free[node]]
    found |= dict(zip(singles, left, strict=True))
    return tuple(found[bundle] for bundle in range(len(order)))


def check_node_sizes(layout: Layout, node_gpus: Sequence[int]) -> list[Problem]:
    """The problem of nodes that have too few GPUs each for the processes of the engines, however they are placed.

    Args:
        node_gpus: GPUs of each node.
    """
    judge = _check_parts(layout.reward_layout, node_gpus, key="reward.engine.num_gpus_per_engine")
    further = [
        problem
        for number in range(len(layout.frozen))
        for problem in _check_parts(layout.frozen_layout(number), node_gpus, key="sglang.config")
    ]
    return _check_parts(layout, node_gpus, key=_size_key(layout)) + judge + further


def _size_key(layout: Layout) -> str:
    """The key with the sizes of the engines of the policy."""
    return "cluster.rollout_num_gpus_per_engine" if layout.gpus_per_prefill_engine is None else "sglang.config"


def _check_parts(layout: Layout, node_gpus: Sequence[int], *, key: str) -> list[Problem]:
    """The first problem of the processes of one size, from the largest size on, which smaller ones fit between."""
    sizes = Counter[int]()
    for engine in range(layout.num_engines):
        sizes[layout.process_gpus(engine)] += layout.engine_gpus(engine)
    total = 0
    for part in sorted(sizes, reverse=True):
        total += sizes[part]
        if part > 1 and _usable_gpus(node_gpus, part) < total:
            return [_too_few_parts(part, total, node_gpus, key=key)]
    return []


def _too_few_parts(part: int, total: int, node_gpus: Sequence[int], *, key: str) -> Problem:
    smaller = max(
        size for size in range(1, part) if part % size == 0 and (size == 1 or _usable_gpus(node_gpus, size) >= total)
    )
    given = ", ".join(map(str, sorted(node_gpus, reverse=True)))
    return Problem(
        path=key,
        rule=f"fit on the nodes ({total // part} x {part} GPUs of one node)",
        value=f"{count_noun(len(node_gpus), 'node')} with {given} GPUs",
        fix=f"set cluster.num_gpus_per_node to the GPUs of a node, or {_resize(key, smaller)}",
    )


def _usable_gpus(node_gpus: Sequence[int], part: int) -> int:
    """GPUs that can be used in parts of this size, each on one node."""
    return sum(gpus // part * part for gpus in node_gpus)


def _resize(key: str, size: int) -> str:
    return f"set {'num_gpus_per_engine' if key == 'sglang.config' else 'it'} to {size}"


def _split_engine(layout: Layout, part: int, counts: Sequence[int]) -> Problem:
    given, key = ", ".join(map(str, sorted(counts, reverse=True))), _size_key(layout)
    return Problem(
        path=key,
        rule=f"fit on the nodes, with {part} GPUs of each",
        value=f"{given} free GPUs on {len(counts)} nodes",
        fix=f"wait until whole nodes are free (see `ray status`), or {_resize(key, math.gcd(part, *counts))}",
    )


def further_engines(config: RunConfig, layout: Layout) -> tuple[Layout, int]:
    """Layout of one engine that may join the run later, and the maximum number of such engines."""
    maximum, size = config.cluster.rollout_max_num_gpus, layout.gpus_per_engine
    number = 0 if maximum is None or not layout.num_engines else maximum // size - layout.num_engines
    one = replace(layout, num_trainers=0, num_engines=1, num_critics=0, num_reward_engines=0, frozen=(), colocate=False)
    return one, max(0, number)


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
    for engine in range(layout.num_engines):
        for bundles in layout.process_bundles(engine):
            for bundle in bundles:
                on[bundle].append(f"{layout.engine_kind(engine)} {engine}")
    for engine in range(layout.num_reward_engines):
        for (bundle,) in layout.reward_layout.process_bundles(engine):
            on[bundle].append(f"reward engine {engine}")
    for number, each in enumerate(layout.frozen):
        for engine in range(each.num_engines):
            for (bundle,) in layout.frozen_layout(number).process_bundles(engine):
                on[bundle].append(f"{each.name} engine {engine}")
    places = [
        Place(node=node, gpu=gpu, actors=tuple(actors))
        for actors, (node, gpus) in zip(on, fill_nodes(layout, gpus_per_node=gpus_per_node), strict=True)
        for gpu in gpus
    ]
    return sorted(places, key=lambda place: (place.node, place.gpu))


def fill_nodes(layout: Layout, *, gpus_per_node: int) -> list[tuple[int, range]]:
    """Node and GPUs of each bundle on equal, empty nodes: the first node that has room for the bundle."""
    used: list[int] = []
    found = []
    for size in layout.bundle_sizes:
        node = next((i for i, taken in enumerate(used) if taken + size <= gpus_per_node), len(used))
        if node == len(used):
            used.append(0)
        found.append((node, range(used[node], used[node] + size)))
        used[node] += size
    return found
