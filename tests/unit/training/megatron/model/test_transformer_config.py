"""Fields of Megatron-core's config that follow from others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.config import MegatronConfig, ModelConfig
from rlscale.training.megatron.model.transformer_config import load_architecture
from tests.tiny_model import write_tiny_qwen3_moe


@pytest.mark.parametrize(
    ("core_args", "kind"),
    [
        ({}, "none"),
        ({"moe_aux_loss_coeff": 0.0}, "none"),
        ({"moe_aux_loss_coeff": 1e-3}, "aux_loss"),
        ({"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": "seq_aux_loss"}, "seq_aux_loss"),
        ({"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": "none"}, "none"),
    ],
)
def test_a_coefficient_enables_the_loss_that_balances_experts(
    tmp_path: Path, core_args: dict[str, Any], kind: str
) -> None:
    architecture = load_architecture(
        str(write_tiny_qwen3_moe(tmp_path / "model")),
        model=ModelConfig(use_hf_config_for_megatron=True),
        megatron=MegatronConfig(core_args=core_args),
        dtype=torch.float32,
    )
    assert architecture.transformer.moe_router_load_balancing_type == kind
