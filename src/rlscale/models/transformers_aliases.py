"""Registers families with transformers that it has under the `model_type` of another family only."""

from __future__ import annotations

from typing import Any

from rlscale.architectures.family import load_families


def register_aliases() -> None:
    """Registers each family with a `transformers_name`, e.g. Kimi-K2 as DeepSeek-V3. Skips names already known.

    The import of transformers' models takes a second, so code that only resolves a model folder must not call this.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in load_families().values():
        if family.transformers_name is not None and family.name not in CONFIG_MAPPING:
            _register(family.name, layers=family.transformers_name)


def _register(model_type: str, *, layers: str) -> None:
    """Registers `model_type` with the config and model class of the family `layers`; imports both."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    base_config = CONFIG_MAPPING[layers]
    base_model: type[Any] = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]  # type: ignore[assignment]  # a tuple for some
    name = "".join(part.title() for part in model_type.split("_"))
    config = type(f"{name}Config", (base_config,), {"model_type": model_type})
    # Published checkpoints name the base architecture, and engines look it up: saved models must name it again.
    model = type(base_model.__name__, (base_model,), {"config_class": config})
    AutoConfig.register(model_type, config)
    AutoModelForCausalLM.register(config, model)
    mapping = get_checkpoint_conversion_mapping(layers)  # type: ignore[no-untyped-call]
    register_checkpoint_conversion_mapping(model_type, mapping)
