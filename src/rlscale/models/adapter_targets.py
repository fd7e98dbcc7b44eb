"""Layers that `train.lora.target_modules` may name, without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlscale.errors import Problem

_MLP_PARTS = frozenset(("gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"))
"""Last name components of the weights of routers, experts, shared experts and dense MLPs."""


def layers_without_adapters(names: Collection[str]) -> frozenset[str]:
    """Last name components of the layers that cannot have adapters: those of MLPs, in a model with experts.

    peft gives adapters of such a name to the stacked experts, whichever layers of the model have it.

    Args:
        names: of all parameters in memory.
    """
    return _MLP_PARTS if any(".experts." in name for name in names) else frozenset()


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
