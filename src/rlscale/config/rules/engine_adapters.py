"""Rules about SGLang engines that get adapters alone, with `train.lora.sync=adapter`."""

from __future__ import annotations

from rlscale.config.groups.rollout import EngineKind
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    attention_groups,
    pipeline_stages,
    sends_adapters,
    server_groups,
    uses_external_engines,
)
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_WITH = "with train.lora.sync=adapter and rollout.engine=sglang"

_STACKED = (
    ("q_proj", ("v_proj",)),
    ("k_proj", ("q_proj", "v_proj")),
    ("v_proj", ("q_proj",)),
    ("up_proj", ("gate_proj",)),
)
"""Layers that SGLang computes as one, and those without whose adapters it ignores or refuses an adapter."""


@rule
def sglang_loads_adapters_in_whole_engines(config: RunConfig) -> list[Problem]:
    """A request names a version that its engine has loaded, which no router knows.

    SGLang loads adapters into one copy of the model: not into pipeline stages, the copies of data-parallel attention or
    a draft model.
    """
    if not _sends_to_sglang(config):
        return []
    wrong = []
    router, stages, groups = config.router, pipeline_stages(config), attention_groups(config)
    if router.enabled or (router.use_middleware_router and router.enabled is None):
        key = "router.enabled" if router.enabled else "router.use_middleware_router"
        wrong.append((key, "be false", "true", "remove it; rlscale spreads the requests"))
    if server_groups(config):
        fix = "remove it; this has not been built for prefill and decode servers"
        wrong.append(("sglang.config", "be null", show(config.sglang.config), fix))
    if stages > 1:
        wrong.append(("sglang.pp_size", "be 1", show(stages), "use tensor parallelism"))
    if groups > 1:
        wrong.append(("sglang.attn_dp_size", "be 1", show(groups), "remove it; start more engines instead"))
    drafts = config.sglang.server_args.get("speculative_algorithm")
    if drafts is not None:
        wrong.append(("sglang.speculative_algorithm", "be null", show(drafts), "remove it"))
    return [Problem(path=path, rule=f"{rule} {_WITH}", value=value, fix=fix) for path, rule, value, fix in wrong]


@rule
def sglang_knows_the_adapted_layers(config: RunConfig) -> list[Problem]:
    """SGLang fuses other projections of latent attention than transformers."""
    if not _sends_to_sglang(config) or architecture_field(config.model, "kv_lora_rank") is None:
        return []
    rule = "be merged with rollout.engine=sglang and a model with latent attention"
    fix = "set train.lora.sync=merged; this has not been built for the fused projections of SGLang"
    return [Problem(path="train.lora.sync", rule=rule, value=config.train.lora.sync, fix=fix)]


@rule
def sglang_gets_whole_stacked_layers(config: RunConfig) -> list[Problem]:
    """SGLang stacks the adapters of queries, keys and values, and of gate and up, starting from those of the first."""
    targets = config.train.lora.target_modules
    if targets is None or not _sends_to_sglang(config):
        return []
    given = {each.rpartition(".")[2] for each in targets}
    for layer, others in _STACKED:
        missing = [each for each in others if each not in given]
        if layer in given and missing:
            added = ",".join([*targets, *missing])
            fix = f"set it to [{added}], or train.lora.sync=merged; SGLang stacks these layers"
            rule = f"contain {' and '.join(missing)} next to {layer} {_WITH}"
            return [Problem(path="train.lora.target_modules", rule=rule, value=show(targets), fix=fix)]
    return []


def _sends_to_sglang(config: RunConfig) -> bool:
    is_sglang = config.rollout.engine == EngineKind.sglang and not uses_external_engines(config)
    return is_sglang and sends_adapters(config)
