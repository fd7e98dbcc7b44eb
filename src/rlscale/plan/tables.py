"""A plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlscale.config import TrainBackendName
from rlscale.config.problems import show
from rlscale.errors import count_noun
from rlscale.plan.engine_memory import EngineMemory
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.head_lines import head_lines
from rlscale.plan.placement import Place
from rlscale.plan.plan import Plan
from rlscale.plan.quantities import format_size
from rlscale.plan.suggestions import Suggestion


def print_plan(plan: Plan, suggestions: Sequence[Suggestion], console: Console) -> None:
    """Prints every table of a plan."""
    for part in _tables(plan, suggestions):
        console.print(part)
        console.print()


def _tables(plan: Plan, suggestions: Sequence[Suggestion]) -> Iterator[RenderableType]:
    yield Text("\n".join(head_lines(plan)))
    yield _batches(plan)
    yield _placement(plan)
    if plan.trainer is not None and plan.trainer_alternative is not None:
        yield _memory_of_trainer(plan, [plan.trainer, plan.trainer_alternative])
    if plan.host is not None:
        yield _host_memory(plan)
    if plan.engine is not None:
        is_decode, last = plan.prefill_engine is not None, plan.layout.num_engines - 1
        if plan.prefill_engine is not None:
            yield _memory_of_engine(plan.prefill_engine, name="a prefill engine", nodes=plan.layout.num_processes(0))
        name, nodes = "a decode engine" if is_decode else "an engine", plan.layout.num_processes(last)
        yield _memory_of_engine(plan.engine, name=name, nodes=nodes, sample_len=plan.lengths.sample)
    if plan.judge is not None:
        nodes = plan.layout.reward_layout.num_processes(0)
        yield _memory_of_engine(plan.judge, name="a reward engine", nodes=nodes)
    yield _fit(plan, suggestions)
    yield _roofline(plan)
    yield _list(
        "derived values", [f"{each} (was {show(each.was)})" if each.was else str(each) for each in plan.derived]
    )
    yield _list("warnings and ignored keys", plan.warnings)
    if plan.refused:
        yield _list("settings that a library cannot carry out", plan.refused)


def _batches(plan: Plan) -> Table:
    b = plan.batches
    table = _table("a rollout in which every sample has these lengths", "quantity", "number")
    rows = {
        "prompts": b.prompts,
        "samples": b.samples,
        "tokens": b.tokens,
        "trainable tokens": b.trainable_tokens,
        "optimizer steps": b.steps,
        "samples per step": b.samples_per_step,
        "micro-batches per step and data-parallel rank": b.microbatches_per_rank,
        "samples per micro-batch": b.samples_per_microbatch,
        "tokens per micro-batch": b.microbatch_tokens,
        "data-parallel ranks": b.ranks,
    }
    for name, number in rows.items():
        table.add_row(name, f"{number:,}")
    if b.route_bytes:
        table.add_row("expert routing of the rollout, in host memory", format_size(b.route_bytes))
    return table


def _placement(plan: Plan) -> Table:
    table = _table("placement", "node", "GPU", "actors")
    for nodes, gpus, actors in placement_rows(plan.places):
        table.add_row(nodes, gpus, actors)
    return table


def placement_rows(places: Sequence[Place]) -> Iterator[tuple[str, str, str]]:
    """Nodes, GPUs and actors. Adjacent GPUs or nodes with the same kinds of actors are one row."""
    # Nodes with the same sequence of actor kinds are one block.
    by_node = [list(group) for _, group in groupby(places, key=lambda place: place.node)]
    for _, alike in groupby(by_node, key=_pattern):
        nodes = list(alike)
        for index, (kinds, run) in enumerate(_runs(nodes[0])):
            members = [place for node in nodes for place in _runs(node)[index][1]]
            actors = " and ".join(_numbered(kind, members, i) for i, kind in enumerate(kinds))
            yield _span(nodes[0][0].node, nodes[-1][0].node), _span(run[0].gpu, run[-1].gpu), actors


def _kinds(place: Place) -> tuple[str, ...]:
    return tuple(actor.rpartition(" ")[0] for actor in place.actors)


def _runs(node: Sequence[Place]) -> list[tuple[tuple[str, ...], list[Place]]]:
    return [(kinds, list(run)) for kinds, run in groupby(node, key=_kinds)]


def _pattern(node: Sequence[Place]) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((kinds, len(run)) for kinds, run in _runs(node))


def _numbered(kind: str, members: Sequence[Place], position: int) -> str:
    numbers = [int(place.actors[position].rpartition(" ")[2]) for place in members]
    first, last = numbers[0], numbers[-1]
    return f"{kind} {first}" if first == last else f"{kind}s {first}-{last}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _memory_of_trainer(plan: Plan, both: Sequence[TrainerMemory]) -> RenderableType:
    names = ("activations recomputed", "activations saved")
    title = "memory of a trainer rank"
    table = _table(title, "part", names[not plan.recompute] + " (this run)", names[plan.recompute])
    is_megatron = plan.backend == TrainBackendName.megatron
    sides = [_trainer_parts(each, weights="weights" if is_megatron else "weights, float32") for each in both]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        table.add_row(name, *[format_size(side[name]) if name in side else "" for side in sides])
    table.add_row("peak", *[format_size(each.peak) for each in both], style="bold")
    table.add_row("phase of the peak", *[each.peak_phase for each in both])
    if is_megatron and plan.hardware.name != "cpu":
        return Group(table, Text("An estimate: Transformer Engine's layers on GPUs were not measured."))
    return table


def _host_memory(plan: Plan) -> Table:
    ranks = {"trainer rank": plan.host, "critic rank": plan.critic_host}
    planned = {name: each for name, each in ranks.items() if each is not None}
    table = _table(f"host memory of a {' and a '.join(planned)} up to the first step", "part", *planned)
    for role in dict.fromkeys(role for each in planned.values() for role in each.models):
        sizes = [format_size(each.models[role]) if role in each.models else "" for each in planned.values()]
        table.add_row(role, *sizes)
    parts = {"copies": "copy of the offloaded policy", "process": "Python and packages"}
    for part, name in {**parts, "load": "buffers of the load", "sync": "buffers of the first weight sync"}.items():
        if any(getattr(each, part) for each in planned.values()):
            table.add_row(name, *[format_size(getattr(each, part)) for each in planned.values()])
    table.add_row("peak", *[format_size(each.peak) for each in planned.values()], style="bold")
    return table


def _trainer_parts(memory: TrainerMemory, *, weights: str) -> dict[str, float]:
    parts = {weights: memory.weights, "optimizer": memory.optimizer}
    if memory.reference:
        parts["reference model"] = memory.reference
    if memory.teacher:
        parts["teacher model"] = memory.teacher
    parts |= dict(memory.phases[memory.peak_phase])
    # Shown even if the peak is in another phase: `train.log_probs_chunk_size` changes them.
    if "logits" not in parts:
        parts["logits, in another phase"] = max(phase.get("logits", 0) for phase in memory.phases.values())
    return parts


def _memory_of_engine(engine: EngineMemory, *, name: str, nodes: int, sample_len: int | None = None) -> Table:
    per = f"each of its {engine.gpus} GPUs" if engine.gpus > 1 else "its GPU"
    per += f" on {nodes} nodes" if nodes > 1 else ""
    table = _table(f"memory of {name} ({engine.kind}), on {per}", "part", "size")
    kind = "weights" if engine.precision is None else f"weights, linear layers in {engine.precision}"
    table.add_row(kind, format_size(engine.weights))
    table.add_row("KV cache", format_size(engine.cache))
    if engine.scratch:
        table.add_row("logits and copies of weights", format_size(engine.scratch))
    table.add_row("total", format_size(engine.total), style="bold")
    table.add_row("capacity of the engine's cache, in tokens", f"{engine.cache_tokens:,}")
    if sample_len is not None:
        table.add_row("the same in samples", f"{engine.cache_tokens // sample_len:,}")
    return table


def _fit(plan: Plan, suggestions: Sequence[Suggestion]) -> RenderableType:
    table = _table("memory budgets", "location", "required", "available", "")
    for budget in plan.memory_budgets:
        verdict = Text("fits", style="green") if budget.fits else Text("DOES NOT FIT", style="bold red")
        table.add_row(budget.where, format_size(budget.needed), format_size(budget.available), verdict)
    if not plan.over_budget:
        return table
    if not suggestions:
        return Group(table, Text("No suggestion: no single change and no tested combination makes the run fit."))
    lines = [
        f"  {each.overrides}  (requires {format_size(each.needed)} of {format_size(each.available)} on "
        f"{count_noun(each.num_gpus, 'GPU')})"
        for each in suggestions
    ]
    return Group(table, Text("\n".join(["The run fits with", *lines])))


def _roofline(plan: Plan) -> Table:
    table = _table("roofline (lower bound) of a rollout and its training", "part", "seconds", "bound by")
    for part in plan.roofline.parts:
        table.add_row(part.name, f"{part.seconds:.3g}", part.bound)
    how = "generation and training overlap" if plan.roofline.overlaps else "generation, then training"
    table.add_row("total", f"{plan.roofline.seconds:.3g}", how, style="bold")
    if plan.sync is not None:
        buckets = f"{count_noun(plan.sync.num_buckets, 'bucket')} by {plan.sync.channel}"
        table.add_row("traffic of a weight sync", "", f"{format_size(plan.sync.num_bytes)} in {buckets}")
    return table


def _list(title: str, lines: Sequence[str]) -> Text:
    return Text("\n".join([title, *[f"  {line}" for line in lines or ["none"]]]))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0), min_width=len(title)
    )
    for index, column in enumerate(columns):
        is_number = column in ("number", "size", "required", "available", "seconds") or column.startswith(
            ("activations", "trainer", "critic")
        )
        table.add_column(column, justify="right" if is_number and index else "left")
    return table
