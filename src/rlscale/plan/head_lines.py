"""The first lines of a printed plan: model, trained parameters, checkpoint, hardware, lengths."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.errors import count_noun
from rlscale.plan.batches import Lengths
from rlscale.plan.frozen_parameters import ModelPart
from rlscale.plan.placement import Layout
from rlscale.plan.plan import Plan
from rlscale.plan.quantities import format_count, format_size

PART_NAMES = {
    ModelPart.decoder: "decoder",
    ModelPart.projector: "projector",
    ModelPart.tower: "vision tower",
    ModelPart.mtp: "layers for multi-token prediction",
}


def head_lines(plan: Plan) -> list[str]:
    """The lines: the model, the part of it that is trained, hardware and lengths."""
    model = plan.model
    active = f", {format_count(model.active_parameters)} of them active" if model.num_experts else ""
    lines = [
        f"plan of {plan.name}; no process was started",
        f"model     {format_count(model.parameters)} parameters{active}, in {count_noun(model.num_layers, 'layer')}",
        *_tower_line(plan),
        *_trained_lines(plan),
        *_checkpoint_line(plan),
        f"hardware  {plan.hardware.name}: {plan.hardware.title}, {format_size(plan.hardware.memory_bytes)}",
        f"lengths   {_lengths(plan.lengths)}",
    ]
    if plan.engine is None and plan.sync is not None:
        lines.append("engines   external; their memory and time are not planned")
    if plan.prefill_engine is not None:
        lines.append(f"engines   {describe_groups(plan.layout)}")
    if plan.layout.num_reward_engines:
        size = count_noun(plan.layout.gpus_per_reward_engine, "GPU")
        number = count_noun(plan.layout.num_reward_engines, "engine")
        judge = plan.judge_model or "the starting model of the run"
        missing = "time is not planned" if plan.judge else "memory and time are not planned: it has no config.json here"
        lines.append(f"judge     {number} of {size} each with {judge}; {missing}")
    for each in plan.layout.frozen:
        size, number = count_noun(each.gpus_per_engine, "GPU"), count_noun(each.num_engines, "engine")
        lines.append(f"frozen    {number} of {size} each with {each.name}; memory and time are not planned")
    return lines


def describe_groups(layout: Layout) -> str:
    """Numbers and sizes of prefill and decode engines."""
    numbers = {0: layout.num_engines - layout.num_decode_engines, layout.num_engines - 1: layout.num_decode_engines}
    return " and ".join(
        f"{count_noun(number, layout.engine_kind(engine))} of {count_noun(layout.engine_gpus(engine), 'GPU')} each"
        for engine, number in numbers.items()
    )


def _tower_line(plan: Plan) -> list[str]:
    tower = plan.model.tower
    if tower is not None:
        return [
            f"vision    {format_count(tower.parameters)} of them in the tower, in {count_noun(tower.depth, 'block')}"
        ]
    family = find_family(plan.model.model_type)
    return [] if family.vision is None else ["vision    the tower is not counted: the model has no config.json here"]


def _trained_lines(plan: Plan) -> list[str]:
    """Layers for multi-token prediction, and what is trained where that is not everything."""
    trained = plan.trained
    if trained is None:
        return []
    lines, mtp = [], trained.mtp
    if mtp.number:
        size, state = format_count(trained.whole[ModelPart.mtp]), "trained" if mtp.is_trained else "frozen"
        lines.append(f"mtp       {size} more in {count_noun(mtp.number, 'layer')} for multi-token prediction, {state}")
    if trained.trained < trained.parameters:
        parts = [f"{format_count(trained.adapters)} of adapters"] if trained.adapters else []
        parts += [
            f"{format_count(size - trained.frozen[part])} of {format_count(size)} of the {PART_NAMES[part]}"
            for part, size in trained.whole.items()
            if not trained.adapters
        ]
        lines.append(f"trained   {format_count(trained.trained)} parameters: {', '.join(parts)}")
    return lines


def _checkpoint_line(plan: Plan) -> list[str]:
    size = plan.checkpoint
    if size is None:
        return []
    names = {"weights": size.weights, "optimizer": size.optimizer, "reference": size.reference, "critic": size.critic}
    parts = ", ".join(f"{name} {format_size(number)}" for name, number in names.items() if number)
    export = f"; the export {format_size(size.export)}" if size.export else ""
    return [f"disk      {format_size(size.total)} for a checkpoint ({parts}){export}"]


def _lengths(lengths: Lengths) -> str:
    return (
        f"prompt {count_noun(lengths.prompt, 'token')} ({lengths.prompt_from}), "
        f"response {count_noun(lengths.response, 'token')} ({lengths.response_from})"
    )
