"""SGLang quantises exactly the layers whose weights a sync in low precision sends quantised."""

import json
import os
import subprocess

import pytest

from rlscale.architectures.low_precision import quantization_config
from rlscale.config.passthrough.sglang_python import find_python, foreign_environment

CODE = """
import json, sys
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
config = Fp8Config.from_config(json.loads(sys.argv[1]))
fused = {"in_proj_ba": ["in_proj_b", "in_proj_a"]}  # models/qwen3_5.py
print(json.dumps([is_layer_skipped(name, config.ignored_layers, fused_mapping=fused) for name in sys.argv[2:]]))
"""
QUANTIZED = (
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.mlp.experts",
    "model.layers.0.mlp.shared_expert.gate_up_proj",
    "model.layers.0.block_sparse_moe.experts",
    "model.layers.0.linear_attn.in_proj_qkvz",
    "model.layers.0.linear_attn.out_proj",
    "model.language_model.layers.0.self_attn.qkv_proj",
)
KEPT = (
    "model.visual.blocks.0.attn.qkv_proj",
    "visual.blocks.0.mlp.gate_up_proj",
    "visual.merger.mlp.0",
    "model.layers.0.linear_attn.in_proj_ba",
    "model.layers.0.mlp.shared_expert_gate",
    "model.layers.0.mlp.gate",
    "lm_head",
)


@pytest.mark.nightly
def test_sglang_skips_the_layers_that_keep_their_dtype() -> None:
    command = [str(find_python(None)), "-c", CODE, json.dumps(quantization_config("fp8")), *QUANTIZED, *KEPT]
    done = subprocess.run(command, env=foreign_environment(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    skipped = json.loads(done.stdout.splitlines()[-1])
    assert skipped == [False] * len(QUANTIZED) + [True] * len(KEPT)
