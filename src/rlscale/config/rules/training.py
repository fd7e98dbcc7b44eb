"""Rules about what is trained, against what, and by which kernels."""

from __future__ import annotations

import re

from rlscale.config.errors import show
from rlscale.config.groups.algo import compares_policies, uses_reference, uses_teacher
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import QkvFormat, TrainBackendName
from rlscale.config.rules.rule import are_external, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

REFERENCE = (
    "algo.use_kl_loss",
    "algo.kl_coef",
    "algo.loss_type",
    "algo.compute_advantages_and_returns",
    "model.ref_load",
)
"""Keys that say whether there is a reference model, and where it is given."""


@rule(*REFERENCE, "checkpoint.load", "model.hf_checkpoint", "model.build")
def reference_can_be_found(config: RunConfig) -> list[Problem]:
    """`model.ref_load`, else `checkpoint.load`, else `model.hf_checkpoint`, else the model that is built."""
    model = config.model
    sources = (model.ref_load, config.checkpoint.load, model.hf_checkpoint, model.build)
    if not uses_reference(config.algo) or any(source is not None for source in sources):
        return []
    name = "algo.use_kl_loss" if config.algo.use_kl_loss else f"algo.kl_coef={config.algo.kl_coef:g}"
    fix = "set it, or model.hf_checkpoint, to a Hugging Face folder"
    return [Problem(path="model.ref_load", rule=f"be set with {name}", value="null", fix=fix)]


@rule(*REFERENCE, "model.ref_ckpt_step")
def reference_step_has_a_folder(config: RunConfig) -> list[Problem]:
    step = config.model.ref_ckpt_step
    if step is None or not uses_reference(config.algo) or config.model.ref_load is not None:
        return []
    rule, fix = "be null without model.ref_load", "set model.ref_load to the folder of the checkpoints it counts in"
    return [Problem(path="model.ref_ckpt_step", rule=rule, value=show(step), fix=fix)]


@rule("train.only_train_params", "train.freeze_params")
def parameters_are_chosen_one_way(config: RunConfig) -> list[Problem]:
    only, frozen = config.train.only_train_params, config.train.freeze_params
    if only is None or frozen is None:
        return []
    rule, fix = "be null with train.only_train_params", "leave one of them out"
    return [Problem(path="train.freeze_params", rule=rule, value=show(frozen), fix=fix)]


@rule("train.only_train_params", "train.freeze_params")
def parameter_patterns_can_be_read(config: RunConfig) -> list[Problem]:
    problems = []
    for name in ("only_train_params", "freeze_params"):
        for pattern in getattr(config.train, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                path, rule = f"train.{name}", "hold regular expressions"
                problems.append(Problem(path=path, rule=rule, value=pattern, fix=str(error)))
    return problems


@rule("train.keep_old_actor", "train.weights_backuper")
def old_policy_is_kept_in_memory(config: RunConfig) -> list[Problem]:
    if not config.train.keep_old_actor or config.train.weights_backuper:
        return []
    rule, fix = "be true with train.keep_old_actor", "the old policy waits in host memory for its turn; leave it out"
    return [Problem(path="train.weights_backuper", rule=rule, value="false", fix=fix)]


@rule("train.keep_old_actor", "algo.use_rollout_logprobs", "algo.decoupled_loss", "algo.loss_type")
def old_logprobs_come_from_one_place(config: RunConfig) -> list[Problem]:
    """The kept weights give the logprobs of the policy that generated; others want those of the engine, or of now."""
    algo = config.algo
    if not config.train.keep_old_actor or not compares_policies(algo):
        return []
    fixes = {
        "use_rollout_logprobs": "the engine's logprobs need no weights; keep one of them",
        "decoupled_loss": "it clips around the policy as the rollout's training begins; keep one of them",
    }
    rule = "be false with train.keep_old_actor"
    return [
        Problem(path=f"algo.{name}", rule=rule, value="true", fix=fix)
        for name, fix in fixes.items()
        if getattr(algo, name)
    ]


@rule("algo.opd_kl_coef", "algo.loss_type", "algo.compute_advantages_and_returns", "model.teacher_load")
def distillation_has_a_teacher(config: RunConfig) -> list[Problem]:
    if not uses_teacher(config.algo) or config.model.teacher_load is not None:
        return []
    rule, fix = f"be set with algo.opd_kl_coef={config.algo.opd_kl_coef:g}", "name the teacher's Hugging Face folder"
    return [Problem(path="model.teacher_load", rule=rule, value="null", fix=fix)]


ROUTES = ("algo.use_rollout_routing_replay", "algo.use_routing_replay")
"""Keys with which tokens go to experts that were chosen before."""


def _replays(config: RunConfig) -> list[str]:
    """Those of `ROUTES` that are on."""
    return [path for path in ROUTES if getattr(config.algo, path.removeprefix("algo."))]


@rule(*ROUTES, "model.num_experts", "model.num_layers")
def routes_lead_to_experts(config: RunConfig) -> list[Problem]:
    """A model whose figures are given and name no experts has none."""
    if config.model.num_experts is not None or config.model.num_layers is None:
        return []
    rule, fix = "be false with a model that has no experts", "leave it out"
    return [Problem(path=path, rule=rule, value="true", fix=fix) for path in _replays(config)]


@rule(*ROUTES)
def routes_come_from_one_place(config: RunConfig) -> list[Problem]:
    """The engine's routes are taken for the old logprobs, too: there are no others to be kept from them."""
    if len(_replays(config)) < 2:
        return []
    rule, fix = f"be false with {ROUTES[0]}", "keep one of them"
    return [Problem(path=ROUTES[1], rule=rule, value="true", fix=fix)]


@rule(
    *ROUTES,
    "train.backend",
    "train.qkv_format",
    "train.keep_old_actor",
    "megatron.core_args",
)
def routes_are_taken_again(config: RunConfig) -> list[Problem]:
    """Megatron-core's routers are asked, token by token of packed samples, for those of the policy before its steps.

    Those of earlier versions come from the engine only.
    """
    keys = _replays(config)
    if not keys:
        return []
    rule = f"be {{}} with {keys[0]}"
    kept = config.train.keep_old_actor and not config.algo.use_rollout_routing_replay
    fused = bool(config.megatron.core_args.get("moe_router_fusion"))
    wrong = {
        "train.backend": ("megatron", config.train.backend != TrainBackendName.megatron, "choose train=megatron"),
        "train.qkv_format": ("thd", config.train.qkv_format != QkvFormat.thd, "leave it out"),
        "train.keep_old_actor": ("false", kept, "earlier versions routed their tokens otherwise; keep one of them"),
        "megatron.moe_router_fusion": ("false", fused, "the fused router chooses by itself; leave it out"),
    }
    values = {"train.backend": config.train.backend, "train.qkv_format": config.train.qkv_format}
    return [
        Problem(path=path, rule=rule.format(right), value=show(values.get(path, True)), fix=fix)
        for path, (right, is_wrong, fix) in wrong.items()
        if is_wrong
    ]


@rule(
    "train.true_on_policy_mode",
    "train.backend",
    "rollout.engine",
    "rollout.deterministic",
    "rollout.max_staleness",
    "rollout.external",
    "fsdp.context_parallel_size",
)
def equal_kernels_need_equal_weights(config: RunConfig) -> list[Problem]:
    """Trainer and engine give equal bits only with the same weights, and when neither depends on its batch."""
    if not config.train.true_on_policy_mode:
        return []
    problems = []

    def problem(path: str, rule: str, value: str, fix: str) -> None:
        rule = f"{rule} with train.true_on_policy_mode"
        problems.append(Problem(path=path, rule=rule, value=value, fix=fix))

    rollout = config.rollout
    if config.train.backend != TrainBackendName.fsdp:
        problem("train.backend", "be fsdp", str(config.train.backend), "choose train=fsdp")
    if rollout.max_staleness:
        problem("rollout.max_staleness", "be 0", show(rollout.max_staleness), "older weights give other logprobs")
    if rollout.engine == EngineKind.embedded and not rollout.deterministic:
        problem("rollout.deterministic", "be true", "false", "leave it out")
    if rollout.engine == EngineKind.sglang or are_external(config):
        engine = EngineKind.external if are_external(config) else rollout.engine
        fix = "only the embedded engine computes as the trainer can"
        problem("rollout.engine", "be embedded", str(engine), fix)
    if config.train.backend == TrainBackendName.fsdp and config.fsdp.context_parallel_size > 1:
        size = show(config.fsdp.context_parallel_size)
        problem("fsdp.context_parallel_size", "be 1", size, "no engine cuts a sequence over ranks")
    return problems


@rule(
    "train.lora.rank",
    "train.backend",
    "train.only_train_params",
    "train.freeze_params",
    "train.true_on_policy_mode",
    "train.keep_old_actor",
    "algo.ref_update_interval",
)
def adapters_are_all_that_is_trained(config: RunConfig) -> list[Problem]:
    """What chooses, copies or imitates the weights themselves does not go with adapters."""
    train = config.train
    if not train.lora.rank:
        return []
    problems = []
    if train.backend != TrainBackendName.fsdp:
        problems.append(("train.backend", "be fsdp", str(train.backend), "choose train=fsdp"))
    for name in ("only_train_params", "freeze_params"):
        if getattr(train, name) is not None:
            fix = "train.lora.target_modules chooses the layers"
            problems.append((f"train.{name}", "be null", show(getattr(train, name)), fix))
    for name in ("true_on_policy_mode", "keep_old_actor"):
        if getattr(train, name):
            problems.append((f"train.{name}", "be false", "true", "leave one of them out"))
    interval = config.algo.ref_update_interval
    if interval is not None:
        problems.append(("algo.ref_update_interval", "be null", show(interval), "the reference has no adapters"))
    return [
        Problem(path=path, rule=f"{rule} with train.lora.rank={train.lora.rank}", value=value, fix=fix)
        for path, rule, value, fix in problems
    ]


@rule("train.env_vars")
def variables_have_names(config: RunConfig) -> list[Problem]:
    wrong = [name for name in config.train.env_vars if not re.fullmatch(r"[A-Za-z_]\w*", name)]
    fix = "use letters, digits and _"
    return [Problem(path="train.env_vars", rule="hold names of variables", value=show(name), fix=fix) for name in wrong]
