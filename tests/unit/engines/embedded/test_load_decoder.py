"""Models of the embedded engine: same logits as transformers, and errors for unsupported ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlscale.engines.embedded.load_decoder import eos_ids, load_decoder, num_useful_threads
from rlscale.models.decoder_config import DecoderConfig
from tests.tiny_model import EOS_ID
from tests.unit.engines.embedded.conftest import no_transformers

HF_FIELDS: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("qwen2", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("mistral", {"sliding_window": 64}),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    ],
)
def test_prefill_gives_the_logits_of_transformers(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **HF_FIELDS, **more)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    decoder, limit = load_decoder(
        str(tmp_path), no_transformers, dtype=torch.float32, device=torch.device("cpu"), max_context_len=None
    )
    assert limit == 64
    saved = load_file(tmp_path / "model.safetensors")
    assert decoder.weights.keys() == saved.keys()
    for name, weight in saved.items():
        assert torch.equal(decoder.weights[name], weight), name
    ids = torch.randint(0, 60, (2, 30))
    lengths = torch.tensor([30, 17])
    with torch.inference_mode():
        _, logits = decoder.prefill(ids, lengths)
        for row in range(2):
            expected = model(ids[row : row + 1, : lengths[row]]).logits[0, -1]
            assert torch.allclose(logits[row], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_config_json({"model_type": "llama", **HF_FIELDS, **change})


def test_updated_weights_of_experts_are_used(tmp_path: Path) -> None:
    """A weight update writes into the tensors under the names of the checkpoint."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    ids = torch.randint(0, 60, (1, 8), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**HF_FIELDS, **EXPERTS)).eval()
    model.save_pretrained(tmp_path / "old")
    decoder, _ = load_decoder(
        str(tmp_path / "old"), no_transformers, dtype=torch.float32, device=torch.device("cpu"), max_context_len=None
    )
    with torch.inference_mode():
        decoder.prefill(ids, torch.tensor([8]))  # packs the old weights
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "new")
    for name, weight in load_file(tmp_path / "new" / "model.safetensors").items():
        assert decoder.weights[name].is_contiguous()
        decoder.weights[name].copy_(weight)
    with torch.inference_mode():
        _, logits = decoder.prefill(ids, torch.tensor([8]))
        assert torch.allclose(logits[0], model(ids).logits[0, -1], atol=1e-5)


def test_unknown_weights_are_refused(model_path: Path) -> None:
    from rlscale.engines.embedded.decoder import Decoder
    from rlscale.engines.embedded.load_decoder import read_folder

    read = read_folder(str(model_path))
    assert read is not None
    config, weights = read
    known = DecoderConfig.from_config_json(config)
    more = {**weights, "model.layers.0.extra.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"layers\.0\.extra"):
        Decoder(known, more, dtype=torch.float32, device=torch.device("cpu"), num_positions=64)


def test_context_beyond_the_model_is_refused(model_path: Path) -> None:
    with pytest.raises(ValueError, match="max_context_len must be at most 512"):
        load_decoder(
            str(model_path), no_transformers, dtype=torch.float32, device=torch.device("cpu"), max_context_len=513
        )


def test_end_tokens_of_config(model_path: Path) -> None:
    assert EOS_ID in eos_ids(str(model_path), {"eos_token_id": [7, EOS_ID]})
    assert eos_ids("/no/folder", {"eos_token_id": [7, 8]}) == {7, 8}
    assert eos_ids("/no/folder", {}) == frozenset()


@pytest.mark.parametrize(
    ("num_parameters", "max_threads", "num"), [(10, 8, 1), (800_000, 2, 1), (3_200_000, 2, 2), (3_200_000, 8, 4)]
)
def test_a_small_model_uses_few_threads(num_parameters: int, max_threads: int, num: int) -> None:
    assert num_useful_threads([torch.zeros(num_parameters // 2)] * 2, max_threads=max_threads) == num
