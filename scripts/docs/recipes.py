"""Writes the reference page of the recipes: what each of `conf/experiment/` needs, by its plan for a GPU."""

from __future__ import annotations

from rlscale.config import LoadedConfig, TrainBackendName, load_config_with_notes, uses_critic
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.rules import has_agent
from rlscale.errors import count_noun
from rlscale.plan import Plan, find_hardware, find_suggestions, make_plan
from rlscale.plan.quantities import format_count, format_size

HARDWARE = ("h100", "h200")

OVERLAY = "on=qwen3_4b"
"""The overlay that makes each example of an agent a recipe for a larger model."""

_INTRODUCTION = """# Recipes

The files of `conf/experiment/`, each planned with `rlscale-plan experiment=<name> --hardware <GPU>`: every sample has
the longest prompt and response that the recipe allows. The memory of a trainer rank is its peak; engines of SGLang fill
the rest of their GPU. [Plan a run](../how-to/plan.md) explains the figures and their accuracy. The last rows are the
[examples of agents](../how-to/agent-examples.md) with Qwen3-4B.
"""

_HEAD = ("recipe", "model", "GPUs", "trainer", "memory of a rank", "engines", *HARDWARE)


def make_recipes_page() -> str:
    """The page: one row for each recipe."""
    names = ConfigFolders.find().groups()["experiment"]
    plain = {name: _load(name) for name in names}
    # Agents that are small examples; others have a large model already.
    small = [name for name in names if has_agent(plain[name].config) and plain[name].config.model.build is not None]
    larger = {f"{name} {OVERLAY}": _load(name, OVERLAY) for name in small}
    rows = [_HEAD, ("---",) * len(_HEAD), *(_row(name, loaded) for name, loaded in (plain | larger).items())]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    return f"{_INTRODUCTION}\n{table}\n"


def _load(experiment: str, *overlays: str) -> LoadedConfig:
    return load_config_with_notes([f"experiment={experiment}", *overlays, "cluster.device=cuda"], to_run=False)


def _row(name: str, loaded: LoadedConfig) -> tuple[str, ...]:
    plans = [make_plan(loaded.config, find_hardware(name)) for name in HARDWARE]
    fits = (verdict(loaded, plan) for plan in plans)
    plan = plans[0]
    memory = "-" if plan.trainer is None else format_size(plan.trainer.peak)
    start = (f"`{name}`", _model(plan), _gpus(plan), _trainer(loaded), memory, _engines(plan))
    return (*start, *fits)


def _model(plan: Plan) -> str:
    total = format_count(plan.model.parameters)
    return f"{total}, {format_count(plan.model.active_parameters)} active" if plan.model.num_experts else total


def _gpus(plan: Plan) -> str:
    return f"{plan.layout.num_gpus}{', colocated' if plan.layout.colocate else ''}"


def _trainer(loaded: LoadedConfig) -> str:
    config = loaded.config
    if config.train.backend == TrainBackendName.fsdp:
        sizes = {"CP": config.fsdp.context_parallel_size}
    else:
        sizes = {
            "TP": config.megatron.tensor_model_parallel_size,
            "PP": config.megatron.pipeline_model_parallel_size,
            "CP": config.megatron.context_parallel_size,
            "EP": config.megatron.expert_model_parallel_size,
        }
    words = [str(config.train.backend), *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
    return " ".join([*words, *(["with a critic"] if uses_critic(config.algo) else [])])


def _engines(plan: Plan) -> str:
    layout = plan.layout
    if not layout.num_engines:
        return "-"
    return f"{layout.num_engines} of {count_noun(layout.gpus_per_engine, 'GPU')}"


def verdict(loaded: LoadedConfig, plan: Plan) -> str:
    """Whether the run fits; if not, the budgets that are exceeded and the first change that makes it fit."""
    if not plan.over_budget:
        return "fits"
    reasons = (
        f"{budget.where} requires {format_size(budget.needed)} of {format_size(budget.available)}"
        for budget in plan.over_budget
    )
    found = find_suggestions(loaded.config, plan, lambda config: make_plan(config, plan.hardware))
    advice = f"; fits with `{found[0].overrides}`" if found else ""
    return f"does not fit: {', '.join(reasons)}{advice}"
