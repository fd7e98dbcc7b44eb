"""Model families, found by listing the package `rlscale.architectures.families`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from rlscale.architectures.vision import VisionFamily
from rlscale.architectures.weight_names import HfNames, MtpNames


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family: its weights, its fields, and the parts of rlscale that run it.

    To add a family that is built of existing layers, add one file with a constant `FAMILY`.

    Example:
        # rlscale/architectures/families/qwen9.py
        FAMILY = Family(
            name="qwen9",
            implied={"use_qk_norm": True},
            hf_names=qwen3.FAMILY.hf_names,
            embedded=True,
            chunked_logits=True,
        )
    """

    name: str
    """`model_type` in `config.json`."""
    transformers_name: str | None = None
    """`model_type` under which transformers has the layers. None: `name`."""

    # Fields
    implied: Mapping[str, bool | int] = field(default_factory=dict)
    """Architecture fields that the family's code fixes, so that `config.json` does not contain them."""
    latent_attention: bool = False
    """Multi-head latent attention, as in DeepSeek-V3."""
    sigmoid_experts: bool = False
    """Experts are chosen by sigmoid scores with a bias, as in DeepSeek-V3."""
    gated_shared_expert: bool = False
    """A shared expert has its own width, `shared_expert_intermediate_size`, and a gate, as in Qwen2-MoE."""
    delta_net: bool = False
    """Layers with linear attention (gated delta nets, arXiv:2412.06464) between layers whose attention has an output
    gate, and norms that scale by 1 + weight, as in Qwen3-Next."""
    wide_qk_norm: bool = False
    """Queries and keys are normalised over all heads together, as in MiniMax-M2. False: each head by itself."""
    rotary_fraction: float | None = None
    """Fraction of a head that is rotated unless `partial_rotary_factor` says otherwise. None: always the whole head."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies unless `rope_theta` says otherwise."""
    post_norms: bool = False
    """The outputs of attention and MLP are normalised before they are added, as in GLM-4."""
    sinks: bool = False
    """A learnable logit per head takes part in the softmax of attention, linear layers of decoder layers and the router
    have a bias, and gate and up projection of experts are clamped, as in gpt-oss."""
    sliding_window: bool = False
    """`sliding_window` applies unless `use_sliding_window` is false. False: only where that key is true."""

    # Images
    vision: VisionFamily | None = None
    """Images in prompts. None: text only."""

    unused_prefixes: tuple[str, ...] = ()
    """Prefixes of tensors in published checkpoints that rlscale neither trains nor generates with."""

    # Megatron-core
    hf_names: HfNames | None = None
    """Weights under both names. None: Megatron-core does not train this family."""
    plain_query_names: HfNames | None = None
    """The same for models of the family without `q_lora_rank`. None: no difference."""
    mtp: MtpNames | None = None
    """Layers for multi-token prediction that its checkpoints may have (`num_nextn_predict_layers`). None: they have
    none, or Megatron-core does not train them."""
    megatron_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig in which this family differs from others with the same attention."""
    bridge: str | None = None
    """The `model_type` whose table of names in mbridge converts its weights (`model.megatron_to_hf_mode=bridge`)."""

    # Engines
    embedded: bool = False
    """The embedded engine runs it."""
    sglang_unties: bool = False
    """SGLang 0.5.23 gives it a separate output layer even with `tie_word_embeddings=true`."""

    # FSDP2
    fused_cpu: bool = False
    """Its layers compute as `training.cpu.fused_layers`, provided that their linear layers have no bias."""
    chunked_logits: bool = False
    """Its logits are the product of the output layer, neither scaled nor capped, so that they can be made in chunks."""

    @property
    def megatron(self) -> bool:
        """Megatron-core trains it."""
        return self.hf_names is not None

    @property
    def plain_layers(self) -> bool:
        """Its layers are those of Llama, perhaps with biases and norms of queries and keys, or such with experts."""
        others = self.latent_attention, self.sigmoid_experts, self.delta_net, self.wide_qk_norm, self.post_norms
        return not any(others) and not self.sinks and self.rotary_fraction is None


def find_family(model_type: object) -> Family:
    """The family of a `model_type`; for an unknown one a family that no part supports."""
    name = str(model_type)
    return load_families().get(name) or Family(name=name)


@cache
def load_families() -> Mapping[str, Family]:
    """Every family by name, in alphabetical order.

    Imports the modules of the package `families` when it is first called: they hold data only.
    """
    package = importlib.import_module("rlscale.architectures.families")
    modules = [importlib.import_module(f"{package.__name__}.{found.name}") for found in _modules(package.__path__)]
    families: list[Family] = sorted((module.FAMILY for module in modules), key=lambda family: family.name)
    return MappingProxyType({family.name: family for family in families})


def _modules(path: Any) -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(path))


def names_with(support: str) -> tuple[str, ...]:
    """The names of the families with a field of `Family` set.

    Args:
        support: e.g. `embedded`, `megatron` or `bridge`.
    """
    return tuple(name for name, family in load_families().items() if getattr(family, support))
