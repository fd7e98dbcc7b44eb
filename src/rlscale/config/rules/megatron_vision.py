"""Rules about models with a vision tower on Megatron-core."""

from __future__ import annotations

import re

from rlscale.architectures.family import find_family
from rlscale.architectures.tower_shape import find_tower
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_STAGES = "pipeline_model_parallel_size"
_LAYOUT = "pipeline_model_parallel_layout"


@rule
def vision_towers_fit_megatron(config: RunConfig) -> list[Problem]:
    """The tower is in the first chunk, and positions of image tokens are not their places in the sample."""
    family = architecture_field(config.model, "model_type")
    if not uses_megatron(config) or family is None or find_family(family).vision is None:
        return []
    problems, provider = [], config.model.custom_model_provider_path
    if config.megatron.core_args.get("apply_rope_fusion"):
        rule = f"be false with model.model_type={family}: the kernel of Megatron-core 0.16 for packed samples counts "
        rule += "positions itself"
        problems.append(Problem(path="megatron.apply_rope_fusion", rule=rule, value="true", fix="remove it"))
    if provider is not None:
        rule, path = f"be null with model.model_type={family}: it builds no tower", "model.custom_model_provider_path"
        problems.append(Problem(path=path, rule=rule, value=show(provider), fix="remove it, or choose train=fsdp"))
    return problems


@rule
def deepstack_fits_the_first_chunk(config: RunConfig) -> list[Problem]:
    """Features that are added after the first layers are not sent to other pipeline stages."""
    model, args, stages = config.model, config.megatron.core_args, config.megatron.pipeline_model_parallel_size
    layout = args.get(_LAYOUT)
    family, layers = architecture_field(model, "model_type"), architecture_field(model, "num_layers")
    chunks = int(args.get("virtual_pipeline_model_parallel_size") or 1)
    is_whole = stages * chunks == 1 and layout is None
    if not uses_megatron(config) or is_whole or family is None or layers is None or find_family(family).vision is None:
        return []
    tower = find_tower(family, build=model.build, hf_checkpoint=model.hf_checkpoint, width=1)
    found = _first_layers(config, num_layers=layers)
    if tower is None or found >= tower.num_deepstack:
        return []
    rule = f"leave the first {tower.num_deepstack} layers, which add deepstack features, to the first chunk"
    if layout is not None:
        value, fix = f"{show(layout)}, which leaves it {found}", "remove it, or begin it with more layers"
        return [Problem(path=f"megatron.{_LAYOUT}", rule=rule, value=value, fix=fix)]
    fix = f"set it to {max(layers // tower.num_deepstack // chunks, 1)} or less"
    value = f"{stages}, which leaves it {found}"
    return [Problem(path=f"megatron.{_STAGES}", rule=rule, value=value, fix=fix)]


def _first_layers(config: RunConfig, *, num_layers: int) -> int:
    """Decoder layers of the first chunk, as Megatron-core divides them."""
    args, stages = config.megatron.core_args, config.megatron.pipeline_model_parallel_size
    chunks = int(args.get("virtual_pipeline_model_parallel_size") or 1)
    layout = args.get(_LAYOUT)
    if layout is not None:
        return _layers_before_the_first_bar(layout) if isinstance(layout, str) else list(layout[0]).count("decoder")
    last, first = args.get("num_layers_in_last_pipeline_stage"), args.get("num_layers_in_first_pipeline_stage")
    has_embedding, has_loss = (
        bool(args.get(f"account_for_{each}_in_pipeline_split")) for each in ("embedding", "loss")
    )
    if first is None:
        # The other stages have equal numbers of layers, of which the embedding and the loss may each count as one.
        others = num_layers - (last or 0) + has_embedding + has_loss
        first = others // max(stages - (last is not None), 1)
    return int(first) // chunks - has_embedding


def _layers_before_the_first_bar(layout: str) -> int:
    """Decoder layers (`t`) in the first chunk of a layout such as `E(t|)*3tL` or `Et*2|t*2L`."""
    previous = ""
    while previous != layout:
        previous = layout
        layout = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    layout = re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return layout.partition("|")[0].count("t")
