"""The expected answer of SGLang's checker, compared with SHA-256 over the parameters as the server builds them."""

import hashlib
import logging

import pytest
import torch
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.weights.sglang_checksums import SglangChecksums


def sha(tensor: Tensor) -> str:
    """SGLang's `tensor_hash` of a tensor on the CPU."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{int.from_bytes(hashlib.sha256(data).digest()[:8], 'big'):016x}"


def make_layer() -> dict[str, Tensor]:
    torch.manual_seed(0)
    prefix = "model.layers.0."
    return {
        "model.embed_tokens.weight": torch.randn(100, 8).bfloat16(),
        prefix + "self_attn.q_proj.weight": torch.randn(16, 8).bfloat16(),
        prefix + "self_attn.k_proj.weight": torch.randn(8, 8).bfloat16(),
        prefix + "self_attn.v_proj.weight": torch.randn(8, 8).bfloat16(),
        prefix + "self_attn.q_proj.bias": torch.randn(16).bfloat16(),
        prefix + "self_attn.k_proj.bias": torch.randn(8).bfloat16(),
        prefix + "self_attn.v_proj.bias": torch.randn(8).bfloat16(),
        prefix + "self_attn.q_norm.weight": torch.randn(4).bfloat16(),
        prefix + "mlp.gate_proj.weight": torch.randn(12, 8).bfloat16(),
        prefix + "mlp.up_proj.weight": torch.randn(12, 8).bfloat16(),
        "model.norm.weight": torch.randn(8).bfloat16(),
    }


def server_parameters(w: dict[str, Tensor]) -> dict[str, Tensor]:
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    qkv = {
        attention + f"qkv_proj.{kind}": torch.cat([w[attention + f"{part}_proj.{kind}"] for part in "qkv"])
        for kind in ("weight", "bias")
    }
    # 100 rows are padded to 128, a multiple of 64.
    return {
        "model.embed_tokens.weight": torch.cat([w["model.embed_tokens.weight"], torch.zeros(28, 8).bfloat16()]),
        **qkv,
        attention + "q_norm.weight": w[attention + "q_norm.weight"],
        mlp + "gate_up_proj.weight": torch.cat([w[mlp + "gate_proj.weight"], w[mlp + "up_proj.weight"]]),
        "model.norm.weight": w["model.norm.weight"],
    }


def add_all(weights: dict[str, Tensor], names: list[str]) -> SglangChecksums:
    sums = SglangChecksums()
    for name in names:
        sums.add(name, weights[name])
    return sums


@pytest.mark.parametrize("backwards", [False, True])
def test_fused_and_padded_parameters(backwards: bool) -> None:
    weights = make_layer()
    # Fused parameters must not depend on the order in which their parts are added.
    names = list(weights)[::-1] if backwards else list(weights)
    held = {name: sha(tensor) for name, tensor in server_parameters(weights).items()}
    sums = add_all(weights, names)
    assert sums.expected() == held
    sums.compare(held, engine="engine 0")


@pytest.mark.parametrize("name", list(server_parameters(make_layer())))
def test_one_flipped_bit_names_engine_and_parameter(name: str) -> None:
    weights = make_layer()
    held = server_parameters(weights)
    # Some of the server's parameters are the very tensors that were sent, so the bit is changed in a copy.
    held[name] = held[name].clone()
    held[name].view(-1).view(torch.uint8)[3] ^= 1
    with pytest.raises(WeightSyncError, match=rf"engine 3 must hold {name.replace('.', '[.]')} with checksum"):
        add_all(weights, list(weights)).compare({n: sha(t) for n, t in held.items()}, engine="engine 3")


def test_parameters_that_cannot_be_compared_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    weights = make_layer()
    sums = add_all(weights, list(weights))
    held = {name: sha(tensor) for name, tensor in server_parameters(weights).items()}
    with caplog.at_level(logging.WARNING):
        sums.compare({**held, "something.else": "00"}, engine="engine 0")
    assert "1 parameters could not be compared, e.g. something.else" in caplog.text
    with pytest.raises(WeightSyncError, match="engine 0 must have parameters with expected names"):
        sums.compare({"other.weight": "00"}, engine="engine 0")
