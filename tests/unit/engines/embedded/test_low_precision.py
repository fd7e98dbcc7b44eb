"""Engines with quantised weights compute with exactly their dequantised values, and follow every weight sync."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlscale.architectures.low_precision import is_quantized
from rlscale.config import WeightPrecision
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.load_decoder import load_decoder
from rlscale.engines.embedded.named_weights import NamedWeights
from rlscale.engines.server.generate_request import BadRequest
from rlscale.models.quantized_weights import QuantizedWeight, quantize_weights
from rlscale.weights.buckets import describe_bucket
from tests.tiny_model import write_tiny, write_tiny_qwen3, write_tiny_qwen3_moe
from tests.unit.engines.embedded.conftest import no_transformers

WriteModel = Callable[..., Path]
# The inputs of the tiny experts are no multiple of 32.
CASES = [
    (write_tiny_qwen3, WeightPrecision.fp8),
    (write_tiny_qwen3, WeightPrecision.int4),
    (write_tiny_qwen3_moe, WeightPrecision.fp8),
    (partial(write_tiny, family="kimi_k2"), WeightPrecision.fp8),
    (partial(write_tiny, family="glm4"), WeightPrecision.int4),
    (partial(write_tiny, family="minimax_m2"), WeightPrecision.fp8),
    (partial(write_tiny, family="gpt_oss"), WeightPrecision.fp8),
    (partial(write_tiny, family="gpt_oss", intermediate_size=64), WeightPrecision.int4),
    (partial(write_tiny, family="qwen3_next"), WeightPrecision.fp8),
    (partial(write_tiny, family="qwen3_5_text"), WeightPrecision.fp8),
    (partial(write_tiny, family="qwen3_5_text", linear_value_head_dim=16), WeightPrecision.int4),
]


def open_decoder(folder: Path, precision: WeightPrecision | None = None) -> Decoder:
    decoder, _ = load_decoder(
        str(folder),
        no_transformers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_context_len=None,
        precision=precision,
    )
    return decoder


def read_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def write_dequantized(folder: Path, precision: WeightPrecision) -> Path:
    """Replaces the linear layers of a folder by what is left of them in low precision."""
    rounded = {
        name: QuantizedWeight(name, weight, precision).dense() if is_quantized(name) else weight
        for name, weight in read_weights(folder).items()
    }
    save_file(rounded, folder / "model.safetensors")
    return folder


def compute_logits(decoder: Decoder) -> Tensor:
    with torch.inference_mode():
        return decoder.prefill(torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]))[1]


def send(decoder: Decoder, weights: dict[str, Tensor]) -> None:
    """Writes weights as a sync does, to the tensors of their names."""
    named = list(weights.items())
    targets = NamedWeights(decoder.weights, decoder.aliases).targets(describe_bucket(named))
    with torch.inference_mode():
        for target, (_, tensor) in zip(targets, named, strict=True):
            target.copy_(tensor)


@pytest.mark.parametrize(("write", "precision"), CASES)
def test_logits_are_those_of_the_dequantised_weights(
    tmp_path: Path, write: WriteModel, precision: WeightPrecision
) -> None:
    quantized = compute_logits(open_decoder(write(tmp_path / "a"), precision))
    assert not torch.equal(quantized, compute_logits(open_decoder(tmp_path / "a")))
    rounded = open_decoder(write_dequantized(write(tmp_path / "b"), precision))
    assert torch.equal(quantized, compute_logits(rounded))


@pytest.mark.parametrize(("write", "precision"), CASES)
def test_a_sync_replaces_all_weights(tmp_path: Path, write: WriteModel, precision: WeightPrecision) -> None:
    decoder = open_decoder(write(tmp_path / "old"), precision)
    before = compute_logits(decoder)
    new = write(tmp_path / "new", seed=1)
    sent = dict(quantize_weights(read_weights(new).items(), precision))
    assert sent.keys() - decoder.aliases.keys() == decoder.weights.keys()
    send(decoder, sent)
    after = compute_logits(decoder)
    assert not torch.equal(after, before)
    assert torch.equal(after, compute_logits(open_decoder(new, precision)))
    decoder.free_packed_weights()
    assert torch.equal(after, compute_logits(decoder))


def test_a_precision_that_differs_is_refused(tmp_path: Path) -> None:
    weights = read_weights(write_tiny_qwen3(tmp_path))
    quantized, plain = open_decoder(tmp_path, WeightPrecision.fp8), open_decoder(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(BadRequest, match=f"dtypes must be float8_e4m3fn for {name}, got 'float32'"):
        send(quantized, {name: weights[name]})
    with pytest.raises(BadRequest, match=f"dtypes must be float32 for {name}, got 'float8_e4m3fn'"):
        send(plain, dict(quantize_weights([(name, weights[name])], WeightPrecision.fp8)))
    with pytest.raises(BadRequest, match="names must be weights of this model"):
        send(quantized, dict(quantize_weights([(name, weights[name])], WeightPrecision.int4)))
