"""Rules about models with a vision tower on Megatron-core."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.architectures.tower_shape import find_tower
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_STAGES = "pipeline_model_parallel_size"
_FALSE_ARGS = (
    "apply_rope_fusion",  # the fused kernel counts positions itself, from the start of each sample
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@rule
def vision_towers_fit_megatron(config: RunConfig) -> list[Problem]:
    """The tower is whole on every rank of the first stage, and features are placed in packed tokens."""
    family = architecture_field(config.model, "model_type")
    if not uses_megatron(config) or family is None or find_family(family).vision is None:
        return []
    megatron = config.megatron
    wrong: list[tuple[str, str, object]] = []
    wrong += [(f"megatron.{name}", "false", True) for name in _FALSE_ARGS if megatron.core_args.get(name)]
    layout = megatron.core_args.get("pipeline_model_parallel_layout")
    if layout is not None:
        wrong.append(("megatron.pipeline_model_parallel_layout", "null", layout))
    if config.model.custom_model_provider_path is not None:
        wrong.append(("model.custom_model_provider_path", "null", config.model.custom_model_provider_path))
    return [
        Problem(
            path=path,
            rule=f"be {needed} with train.backend=megatron and model.model_type={family} (not supported yet)",
            value=show(value),
            fix="remove it, or choose train=fsdp",
        )
        for path, needed, value in wrong
    ]


@rule
def deepstack_fits_the_first_chunk(config: RunConfig) -> list[Problem]:
    """Features that are added after the first layers are not sent to other pipeline stages."""
    model, args, stages = config.model, config.megatron.core_args, config.megatron.pipeline_model_parallel_size
    family, layers = architecture_field(model, "model_type"), architecture_field(model, "num_layers")
    chunks = int(args.get("virtual_pipeline_model_parallel_size") or 1)
    if not uses_megatron(config) or stages * chunks == 1 or family is None or layers is None:
        return []
    if find_family(family).vision is None:
        return []
    tower = find_tower(family, build=model.build, hf_checkpoint=model.hf_checkpoint, width=1)
    last, first = args.get("num_layers_in_last_pipeline_stage"), args.get("num_layers_in_first_pipeline_stage")
    if first is None:
        # The other stages have equal numbers of layers.
        first = (layers - (last or 0)) // max(stages - (last is not None), 1)
    found = first // chunks
    if tower is None or found >= tower.num_deepstack:
        return []
    rule = f"leave the first {tower.num_deepstack} layers, which add deepstack features, to the first chunk"
    fix = f"set it to {max(layers // tower.num_deepstack // chunks, 1)} or less"
    value = f"{stages}, which leaves it {found}"
    return [Problem(path=f"megatron.{_STAGES}", rule=rule, value=value, fix=fix)]
