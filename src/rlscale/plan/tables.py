"""A plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlscale.config import TrainBackendName
from rlscale.config.errors import show
from rlscale.plan.batches import Lengths
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.placement import Place
from rlscale.plan.plan import Plan
from rlscale.plan.suggestions import Fix


def print_plan(plan: Plan, fixes: Sequence[Fix], console: Console) -> None:
    """Writes every part of the plan, one under the other."""
    for part in _parts(plan, fixes):
        console.print(part)
        console.print()


def _parts(plan: Plan, fixes: Sequence[Fix]) -> Iterator[RenderableType]:
    yield _head(plan)
    yield _batches(plan)
    yield _placement(plan)
    if plan.trainer is not None and plan.trainer_otherwise is not None:
        yield _memory_of_trainer(plan, [plan.trainer, plan.trainer_otherwise])
    if plan.engine is not None:
        yield _memory_of_engine(plan)
    yield _fit(plan, fixes)
    yield _floor(plan)
    yield _list(
        "what was derived", [f"{each} (was {show(each.was)})" if each.was else str(each) for each in plan.derived]
    )
    yield _list("warnings, and keys without effect", plan.warnings)
    if plan.not_built:
        yield _list("what this version cannot run yet", plan.not_built)


def _head(plan: Plan) -> RenderableType:
    model = plan.model
    active = f", {_count(model.active_parameters)} of them active" if model.num_experts else ""
    lines = [
        f"{plan.name}: what it will do; nothing was started",
        f"model     {_count(model.parameters)} parameters{active}, in {model.num_layers} layers",
        f"hardware  {plan.hardware.name}: {plan.hardware.title}, {_size(plan.hardware.memory_bytes)}",
        f"lengths   {_lengths(plan.lengths)}",
    ]
    if plan.engine is None and plan.sync is not None:
        lines.append("engines   run already; their memory and their time are not planned")
    return Text("\n".join(lines))


def _lengths(lengths: Lengths) -> str:
    return (
        f"prompt {lengths.prompt} tokens ({lengths.prompt_from}), "
        f"response {lengths.response} tokens ({lengths.response_from})"
    )


def _batches(plan: Plan) -> Table:
    b = plan.batches
    table = _table("a rollout, when every sample is that long", "what", "number")
    rows = {
        "prompts": b.prompts,
        "samples": b.samples,
        "tokens": b.tokens,
        "trainable tokens": b.trainable_tokens,
        "optimiser steps": b.steps,
        "samples of a step": b.samples_per_step,
        "micro-batches of a step, on each data-parallel rank": b.microbatches_per_rank,
        "samples of a micro-batch": b.samples_per_microbatch,
        "tokens of a micro-batch": b.microbatch_tokens,
        "data-parallel ranks": b.ranks,
    }
    for name, number in rows.items():
        table.add_row(name, f"{number:,}")
    if b.route_bytes:
        table.add_row("routes that come with it, in the host's memory", _size(b.route_bytes))
    return table


def _placement(plan: Plan) -> Table:
    table = _table("placement", "node", "GPU", "who")
    for nodes, gpus, who in placement_rows(plan.places):
        table.add_row(nodes, gpus, who)
    return table


def placement_rows(places: Sequence[Place]) -> Iterator[tuple[str, str, str]]:
    """Nodes, GPUs and actors; neighbours that hold the same kinds of actors are one row."""
    by_node = [list(group) for _, group in groupby(places, key=lambda place: place.node)]
    for _, alike in groupby(by_node, key=_pattern):
        nodes = list(alike)
        for index, (kinds, run) in enumerate(_runs(nodes[0])):
            members = [place for node in nodes for place in _runs(node)[index][1]]
            who = " and ".join(_numbered(kind, members, i) for i, kind in enumerate(kinds))
            yield _span(nodes[0][0].node, nodes[-1][0].node), _span(run[0].gpu, run[-1].gpu), who


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
    names = ("activations recomputed", "activations kept")
    title = "memory of a trainer rank"
    table = _table(title, "part", names[not plan.recompute] + " (this run)", names[plan.recompute])
    is_megatron = plan.backend == TrainBackendName.megatron
    sides = [_trainer_parts(each, weights="weights" if is_megatron else "weights, float32") for each in both]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        table.add_row(name, *[_size(side[name]) if name in side else "" for side in sides])
    table.add_row("most at once", *[_size(each.peak) for each in both], style="bold")
    table.add_row("when", *[each.peak_moment for each in both])
    if is_megatron and plan.hardware.name != "cpu":
        return Group(table, Text("On GPUs an estimate: Transformer Engine's layers have not been measured."))
    return table


def _trainer_parts(memory: TrainerMemory, *, weights: str) -> dict[str, float]:
    parts = {weights: memory.weights, "optimizer": memory.optimizer}
    if memory.reference:
        parts["reference model"] = memory.reference
    parts |= dict(memory.moments[memory.peak_moment])
    if "logits" not in parts:
        parts["logits, at another moment"] = max(moment.get("logits", 0) for moment in memory.moments.values())
    return parts


def _memory_of_engine(plan: Plan) -> Table:
    engine = plan.engine
    assert engine is not None, "asked for only with an engine"
    per = f"each of its {engine.gpus} GPUs" if engine.gpus > 1 else "its GPU"
    table = _table(f"memory of an engine ({engine.kind}), on {per}", "part", "size")
    table.add_row("weights", _size(engine.weights))
    table.add_row("cache of keys and values", _size(engine.cache))
    if engine.scratch:
        table.add_row("logits and copies of weights", _size(engine.scratch))
    table.add_row("together", _size(engine.total), style="bold")
    samples = engine.cache_tokens // plan.lengths.sample
    table.add_row("tokens in the cache of the engine", f"{engine.cache_tokens:,}")
    table.add_row("whole samples in it", f"{samples:,}")
    return table


def _fit(plan: Plan, fixes: Sequence[Fix]) -> RenderableType:
    table = _table("does it fit", "where", "needs", "has", "")
    for demand in plan.demands:
        verdict = Text("fits", style="green") if demand.fits else Text("DOES NOT FIT", style="bold red")
        table.add_row(demand.where, _size(demand.needed), _size(demand.available), verdict)
    if not plan.over_budget:
        return table
    if not fixes:
        return Group(table, Text("No single change, and no combination that was tried, makes it fit."))
    lines = [
        f"  {fix.words}  (then {_size(fix.needed)} of {_size(fix.available)}, on {fix.num_gpus} GPUs)" for fix in fixes
    ]
    return Group(table, Text("\n".join(["It would fit with", *lines])))


def _floor(plan: Plan) -> Table:
    table = _table("least time of a rollout and its training", "part", "seconds", "bound by")
    for part in plan.floor.parts:
        table.add_row(part.name, f"{part.seconds:.3g}", part.bound)
    how = "generation beside training" if plan.floor.overlaps else "one after the other"
    table.add_row("together", f"{plan.floor.seconds:.3g}", how, style="bold")
    if plan.sync is not None:
        what = f"{_size(plan.sync.num_bytes)} in {plan.sync.num_buckets} buckets by {plan.sync.channel}"
        table.add_row("a weight sync moves", "", what)
    return table


def _list(title: str, lines: Sequence[str]) -> Text:
    return Text("\n".join([title, *[f"  {line}" for line in lines or ["none"]]]))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0), min_width=len(title)
    )
    for index, column in enumerate(columns):
        number = column in ("number", "size", "needs", "has", "seconds") or column.startswith("activations")
        table.add_column(column, justify="right" if number and index else "left")
    return table


def _size(num_bytes: float) -> str:
    """Bytes for people: `76.3 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def _count(number: float) -> str:
    """`4.02 billion`."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"
