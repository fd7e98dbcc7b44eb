"""Kimi-K2 for transformers, which has its layers under the name of DeepSeek-V3 only."""

from __future__ import annotations

MODEL_TYPE = "kimi_k2"
_LAYERS = "deepseek_v3"


def register_kimi() -> None:
    """Has transformers know `model_type=kimi_k2` in this process; does nothing the second time, or where it does.

    To import it takes a second, which whoever only resolves a model's folder should not pay.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if MODEL_TYPE in CONFIG_MAPPING:
        return
    config = type("KimiK2Config", (DeepseekV3Config,), {"model_type": MODEL_TYPE})
    # Published checkpoints name this architecture, and engines look for it: models are saved with it again.
    model = type(DeepseekV3ForCausalLM.__name__, (DeepseekV3ForCausalLM,), {"config_class": config})
    AutoConfig.register(MODEL_TYPE, config)
    AutoModelForCausalLM.register(config, model)
    mapping = get_checkpoint_conversion_mapping(_LAYERS)  # type: ignore[no-untyped-call]
    register_checkpoint_conversion_mapping(MODEL_TYPE, mapping)
