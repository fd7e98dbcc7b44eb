"""Limits of SGLang 0.5.23 and Megatron-core 0.16 in a run, by the arguments that exceed them.

Rules about their other arguments are in `rules/library_args.py`. Evidence for each limit is in docs/how-to/megatron.md
and docs/how-to/sglang.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.problems import show
from rlscale.config.rules import server_groups, warn_ignored
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryLimit:
    """The only value of an argument that works, and the reason, which names the library."""

    value: Any
    reason: str


def _limits(reason: str, **values: Any) -> dict[str, LibraryLimit]:
    return {name.replace("__", ".", 1): LibraryLimit(value=value, reason=reason) for name, value in values.items()}


LIMITS: Mapping[str, LibraryLimit] = MappingProxyType(
    {
        **_limits(
            "encoder servers of SGLang 0.5.23 take no weight updates",
            sglang__encoder_only=False,
            sglang__language_only=False,
        ),
        **_limits(
            "Megatron-core 0.16 sets it itself, from megatron.pipeline_model_parallel_layout",
            megatron__mtp_standalone=False,
        ),
        **_limits(
            "Megatron-core 0.16 computes in FP8 and FP4 only with layers of Transformer Engine, for multiples of 16 "
            "tokens, and packed samples have any number",
            megatron__fp8=None,
            megatron__fp8_param=False,
            megatron__fp4=None,
            megatron__fp4_param=False,
        ),
        **_limits(
            "Megatron-core 0.16 has it only for groups of samples from its own data loader, on CUDA",
            megatron__hybrid_context_parallel=False,
        ),
        **_limits(
            "Megatron-core 0.16 has it only with attention of Transformer Engine (cp_comm_type=a2a+p2p)",
            megatron__hierarchical_context_parallel_sizes=None,
        ),
        **_limits(
            "CUDA graphs of Megatron-core 0.16 repeat one shape, and micro-batches of packed samples differ in length",
            megatron__cuda_graph_impl="none",
            megatron__enable_cuda_graph=False,
            megatron__external_cuda_graph=False,
        ),
        **_limits(
            "Megatron-core 0.16 runs two micro-batches on two CUDA streams, in parts that only its own GPTModel has",
            megatron__overlap_moe_expert_parallel_comm=False,
        ),
        **_limits(
            "Megatron-core 0.16 has it only in linear layers of Transformer Engine",
            megatron__delay_wgrad_compute=False,
        ),
        **_limits(
            "Megatron-core 0.16 has it only in linear layers of Transformer Engine, whose buffers have one length",
            megatron__tp_comm_overlap=False,
        ),
        **_limits(
            "Megatron-core 0.16 has it only with the CUDA extension fused_weight_gradient_mlp_cuda of Apex, for logits "
            "of whole micro-batches",
            megatron__defer_embedding_wgrad_compute=False,
        ),
        **_limits(
            "Megatron-core 0.16 measures the attention logits that it clips only in Transformer Engine's attention",
            megatron__qk_clip=False,
        ),
    }
)
"""Path of an argument -> its limit."""


def check_limits(config: RunConfig) -> list[Problem]:
    """One problem for each setting that a library cannot carry out in this run.

    A key without effect in this run is skipped: its warning gives the better reason.
    """
    return [*_argument_problems(config), *_optimizer_problems(config), *_family_problems(config)]


def _argument_problems(config: RunConfig) -> list[Problem]:
    given = {f"sglang.{name}": value for name, value in config.sglang.server_args.items()}
    for group in server_groups(config):
        given |= {f"sglang.{name}": value for name, value in group.server_args.items()}
    given |= {f"megatron.{name}": value for name, value in config.megatron.core_args.items()}
    return [
        Problem(path=path, rule=f"be {show(limit.value)}: {limit.reason}", value=show(given[path]), fix="remove it")
        for path, limit in LIMITS.items()
        # null is the default of every argument.
        if given.get(path) not in (None, limit.value) and not warn_ignored(config, [path])
    ]


def _optimizer_problems(config: RunConfig) -> list[Problem]:
    if not uses_megatron(config) or config.optim.name != OptimizerName.deepspeed_cpu_adam:
        return []
    rule = "be adam or muon with train.backend=megatron: Megatron-core 0.16 has another optimizer in host memory"
    fix = "set optim.name=adam and megatron.optimizer_cpu_offload=true, or choose train=fsdp"
    return [Problem(path="optim.name", rule=rule, value=show(config.optim.name), fix=fix)]


_WITHOUT_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "glm_moe_dsa": "Megatron-core 0.16 has its sparse attention only for samples that are not packed",
    }
)
"""Families that Megatron-core cannot train, with the reason."""


def _family_problems(config: RunConfig) -> list[Problem]:
    """A problem if the model is of a family whose weights have no names of Megatron-core."""
    family = architecture_field(config.model, "model_type")
    if not uses_megatron(config) or family is None or find_family(family).megatron:
        return []
    reason = _WITHOUT_LAYERS.get(family, "rlscale has no names of its weights for Megatron-core")
    rule = f"be fsdp with model.model_type={family}: {reason}"
    return [Problem(path="train.backend", rule=rule, value=show(config.train.backend), fix="choose train=fsdp")]
