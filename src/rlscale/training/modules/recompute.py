"""Recomputation of the layers of a transformers model."""

from __future__ import annotations

from transformers import PreTrainedModel


def recompute_activations(model: PreTrainedModel) -> None:
    """Makes every layer, or block of a vision tower, keep its input alone for the backward pass."""
    # transformers before 5.18 knows the older name only; later ones warn of it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Versions before 5.18 recompute with reentrant autograd by default, which gives a layer no gradient if its input
    # needs none: the first one, where only adapters are trained. The first argument has another name in each version.
    enable({"use_reentrant": False})
