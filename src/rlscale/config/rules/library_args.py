"""Rules about arguments of SGLang and Megatron-core that exist there and cannot work in a run of rlscale."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlscale.config.groups.rollout import EngineKind
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_engines, uses_megatron
from rlscale.config.rules.each_group import for_each_group
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

Refused = Mapping[str, tuple[Any, str]]
"""Argument -> its only value that works, and the reason."""

_ONLY_HTTP = "rlscale sends its requests over HTTP"
_NO_TLS = "rlscale calls its servers by http://"
_NO_ANSWERS = "the server would not generate"
_NO_UPDATES = "SGLang refuses weight updates with it"
_PLACED = "rlscale starts the processes of an engine"
_FROM_CHECKPOINT = "the layers must be those of the model's config.json, which engines compute"
_NOISE = "the trainer would compute other logprobs than the engine"

REFUSED_BY_ENGINES: Refused = MappingProxyType(
    {
        "grpc_mode": (False, _ONLY_HTTP),
        "smg_grpc_mode": (False, _ONLY_HTTP),
        "ssl_certfile": (None, _NO_TLS),
        "ssl_keyfile": (None, _NO_TLS),
        "is_embedding": (False, _NO_ANSWERS),
        "prefill_only_disable_kv_cache": (False, _NO_ANSWERS),
        "skip_tokenizer_init": (False, "answers would have no text, which rewards and stop strings need"),
        "tokenizer_worker_num": (1, "a new weight version would reach one of several HTTP workers only"),
        "weight_cache_mode": ("off", _NO_UPDATES),
        "enable_paged_experts": (False, _NO_UPDATES),
        "kt_weight_path": (None, "experts on the CPU would keep the weights of that path"),
        "checkpoint_engine_wait_weights_before_ready": (False, "the trainer sends weights to servers that are ready"),
        "delete_ckpt_after_loading": (False, "it deletes the folder that the trainer and other engines load"),
        "debug_tensor_dump_input_file": (None, "the server exits after it has computed that file"),
        "gated_launch_port": (None, "the server would wait for a request that rlscale does not send"),
        "ep_join_mode": (None, _PLACED),
        "decoupled_spec_role": ("null", _PLACED),
        "enable_pd_role_switch": (False, "servers keep the role that the file of sglang.config gives them"),
    }
)
"""Arguments of SGLang's server that change its protocol, its processes or its files, or prevent weight updates."""

_LAYERS: Mapping[str, Any] = MappingProxyType(
    {
        "apply_residual_connection_post_layernorm": False,
        "attention_output_gate": False,
        "experimental_attention_variant": None,
        "heterogeneous_block_specs": False,
        "is_hybrid_model": False,
        "layernorm_zero_centered_gamma": False,
        "linear_attention_freq": None,
        "moe_apply_probs_on_input": False,
        "moe_latent_size": None,
        "moe_shared_expert_gate": False,
        "mrope_section": None,
        "no_rope_freq": None,
        "qk_l2_norm": False,
        "softmax_scale": None,
    }
)
"""Fields of Megatron-core that select other layers, with the value of the layers that rlscale builds."""

REFUSED_BY_TRAINERS: Refused = MappingProxyType(
    {
        **{name: (value, _FROM_CHECKPOINT) for name, value in _LAYERS.items()},
        "loss_scale": (None, "the loss is not scaled, so gradients would be divided by it"),
        "moe_input_jitter_eps": (None, _NOISE),
        "moe_router_force_load_balancing": (False, "tokens would go to random experts"),
    }
)
"""Fields of Megatron-core that change the model or its gradients."""


REFUSED: Mapping[str, Refused] = MappingProxyType({"sglang": REFUSED_BY_ENGINES, "megatron": REFUSED_BY_TRAINERS})
"""All of them, by config group."""


@rule
@for_each_group
def engine_arguments_can_work(config: RunConfig) -> list[Problem]:
    """Arguments of SGLang's server that change its protocol, processes or files, or prevent weight updates."""
    if config.rollout.engine != EngineKind.sglang or not uses_engines(config):
        return []
    return _problems("sglang", config.sglang.server_args, REFUSED_BY_ENGINES)


@rule
def megatron_fields_can_work(config: RunConfig) -> list[Problem]:
    """Fields of Megatron-core that would train another model than the engines compute."""
    if not uses_megatron(config):
        return []
    return _problems("megatron", config.megatron.core_args, REFUSED_BY_TRAINERS)


@rule
def interleaved_stages_exchange_single_messages(config: RunConfig) -> list[Problem]:
    """With virtual stages, batched messages in both directions between two ranks would be mixed up."""
    given = config.megatron.core_args
    if not uses_megatron(config) or not given.get("virtual_pipeline_model_parallel_size"):
        return []
    rule = "be {} with megatron.virtual_pipeline_model_parallel_size"
    return [
        Problem(path=f"megatron.{name}", rule=rule.format(show(right)), value=show(given[name]), fix="remove it")
        for name, right in {"overlap_p2p_comm": True, "batch_p2p_comm": False}.items()
        if given.get(name) is not None and given[name] != right
    ]


def _problems(group: str, given: Mapping[str, Any], refused: Refused) -> list[Problem]:
    return [
        Problem(path=f"{group}.{name}", rule=f"be {show(right)}", value=show(given[name]), fix=f"remove it: {why}")
        for name, (right, why) in refused.items()
        # null is the default of every argument.
        if given.get(name) is not None and given[name] != right
    ]
