"""Rules about the servers that generate."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.config.errors import show
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.passthrough.sglang_python import check_python
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.placement import USES_ROUTER, uses_router
from rlscale.config.rules.rule import EXTERNAL, USES_ENGINES, rule, uses_engines
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule(
    "sglang.python",
    *EXTERNAL,
    "router.enabled",
    "cluster.ray_address",
    "cluster.rollout_num_gpus",
    "cluster.rollout_num_gpus_per_engine",
    *USES_ENGINES,
)
def interpreter_has_sglang(config: RunConfig) -> list[Problem]:
    """An interpreter that is given runs and has what it is for. On a cluster it lies on other machines."""
    if config.sglang.python is None or config.cluster.ray_address is not None or not uses_engines(config):
        return []
    serves = config.rollout.engine == EngineKind.sglang
    routes = uses_router(config)
    if not serves and not routes:
        return []
    # Whether it can serve on a CPU is asked once the device is resolved.
    return check_python(config.sglang.python, serves=serves, routes=routes, on_cpu=False)


@rule("sglang.server_args", *USES_ROUTER)
def routes_come_with_samples(config: RunConfig) -> list[Problem]:
    """sglang-router hands on the parts of a request that it knows; a stage of SGLang's pipeline sees its own layers."""
    if not config.algo.use_rollout_routing_replay:
        return []
    rule, problems = "be {} with algo.use_rollout_routing_replay", []
    if uses_router(config):
        fix = "sglang-router does not hand the request for routes on; leave it out"
        problems.append(Problem(path="router.enabled", rule=rule.format("false"), value="true", fix=fix))
    stages = config.sglang.server_args.get("pp_size")
    if config.rollout.engine == EngineKind.sglang and stages not in (None, 1):
        fix = "a stage knows the routes of its own layers only; use tensor parallelism"
        problems.append(Problem(path="sglang.pp_size", rule=rule.format("1"), value=show(stages), fix=fix))
    return problems


@rule("model.tie_word_embeddings", "model.model_type", "model.build", "model.hf_checkpoint", *EXTERNAL, *USES_ENGINES)
def sglang_has_the_output_layer(config: RunConfig) -> list[Problem]:
    """A table that is embedding and output layer in one is sent once: such an output layer is never filled."""
    if config.rollout.engine != EngineKind.sglang or not uses_engines(config):
        return []
    family = architecture_field(config.model, "model_type")
    if not find_family(family).sglang_unties or not architecture_field(config.model, "tie_word_embeddings"):
        return []
    rule = f"be false with rollout.engine=sglang and model.model_type={family}"
    fix = "SGLang does not share the table in this family, and would draw from an empty output layer"
    return [Problem(path="model.tie_word_embeddings", rule=rule, value="true", fix=fix)]
