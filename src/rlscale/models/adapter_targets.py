"""Layers that `train.lora.target_modules` may name, and the scale of adapters of `train.lora.load`; without torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlscale.errors import Problem

ADAPTER_CONFIG = "adapter_config.json"

_MLP_PARTS = frozenset(
    ("gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "router", "shared_expert_gate")
)
"""Last name components of the weights of routers, experts, shared experts and dense MLPs."""

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def layers_without_adapters(names: Collection[str]) -> frozenset[str]:
    """Last name components of the layers that cannot have adapters: those of MLPs, in a model with experts.

    peft gives adapters of such a name to the stacked experts, whichever layers of the model have it.

    Args:
        names: of all parameters in memory.
    """
    return _MLP_PARTS if any(".experts." in name for name in names) else frozenset()


def layers_of_engine(targets: Sequence[str] | None, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Last name components of the layers for which an SGLang server prepares adapters.

    Args:
        targets: value of `train.lora.target_modules`.
        fields: of the model's architecture.
    """
    if targets is not None:
        return tuple(sorted({each.rpartition(".")[2] for each in targets}))
    return _ATTENTION_PARTS if fields.get("num_experts") else (*_ATTENTION_PARTS, "gate_proj", "up_proj", "down_proj")


def check_targets(targets: Sequence[str] | None, names: Collection[str], *, linear: Collection[str]) -> list[Problem]:
    """Problem of adapters in the MLPs of a model with experts, which no weight sync and no export would merge.

    Args:
        targets: value of `train.lora.target_modules`.
        names: of all parameters in memory.
        linear: last name components of the model's linear layers.
    """
    excluded = layers_without_adapters(names)
    if targets is None or excluded.isdisjoint(targets):
        return []
    good = ",".join(sorted(set(linear) - excluded - {"lm_head"}))
    return [
        Problem(
            path="train.lora.target_modules",
            rule="name layers of attention only in a model with experts",
            value=str(list(targets)),
            fix=f"adapters of experts cannot be merged for engines and exports; choose from [{good}]",
        )
    ]


def check_linear(wrong: Sequence[str], *, linear: Collection[str]) -> list[Problem]:
    """Problem of names in `train.lora.target_modules` that no linear layer has; peft would ignore them next to others.

    Args:
        wrong: the names.
        linear: last name components of the model's linear layers.
    """
    fix = f"it has {', '.join(sorted(linear))}"
    rule = "name linear layers of the model"
    return [Problem(path="train.lora.target_modules", rule=rule, value=str(list(wrong)), fix=fix)] if wrong else []


_OTHER_SCALES = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
"""Settings of peft with which an adapter is not W + alpha / rank * B A."""


def check_scale(folder: Path, *, alpha: int) -> list[Problem]:
    """Problem of adapters in peft's format that were trained with another scale than the run uses.

    Args:
        folder: value of `train.lora.load`.
        alpha: value of `train.lora.alpha`.
    """
    try:
        given = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        found = given["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "be a folder of adapters in peft's format"
        fix = f"{ADAPTER_CONFIG} has no lora_alpha ({type(error).__name__}: {error}); check the path"
        return [Problem(path="train.lora.load", rule=rule, value=str(folder), fix=fix)]
    other = [name for name in _OTHER_SCALES if given.get(name)]
    if found != alpha and not (isinstance(found, int | float) and found > 0 and float(found).is_integer()):
        other.append(f"lora_alpha={found}")
    if other:
        rule = "be adapters of the scale lora_alpha / r, with an integer lora_alpha"
        fix = f"choose others; {ADAPTER_CONFIG} has {', '.join(other)}"
        return [Problem(path="train.lora.load", rule=rule, value=str(folder), fix=fix)]
    if found == alpha:
        return []
    rule = f"be the lora_alpha={found:g} of the adapters in train.lora.load"
    return [Problem(path="train.lora.alpha", rule=rule, value=str(alpha), fix=f"set it to {found:g}")]
