"""Families with other layers than Llama: logits of prompts and of decode steps are those of transformers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.load_decoder import load_decoder
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.hf_models import load_causal_lm
from tests.tiny_model import FAMILIES, FIGURES, VOCAB_SIZE, write_tiny
from tests.unit.engines.embedded.conftest import OpenScheduler, generate, no_transformers
from tests.unit.engines.embedded.test_adapters import answer, load, merge, tensors_of, update_of

LENGTHS = torch.tensor([20, 9])
NUM_STEPS, CACHE_LENGTH = 6, 32


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: write_tiny(tmp_path_factory.mktemp(family), family=family))


def open_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder, _ = load_decoder(
        str(folder), no_transformers, dtype=dtype, device=torch.device("cpu"), max_context_len=None
    )
    return decoder


def decode_after(decoder: Decoder, ids_PT: Tensor) -> Tensor:
    """Logits of the prompts of `LENGTHS`, then of the tokens that follow each: [1 + steps, P, V]."""
    heads, num = decoder.architecture.expanded_heads, len(LENGTHS)
    prompts, logits = decoder.prefill(ids_PT[:, : LENGTHS.max()], LENGTHS)
    cache = decoder.new_cache(num, CACHE_LENGTH, CACHE_LENGTH)
    mask = torch.full((num * heads, 1, CACHE_LENGTH), -torch.inf)
    for row, length in enumerate(LENGTHS.tolist()):
        cache.place(row, row + 1, prompts.row(row), length=length)
        mask[cache.rows(row), :, :length] = 0
    found = [logits]
    for positions in (LENGTHS + step for step in range(NUM_STEPS)):
        starts = torch.arange(num * heads) * CACHE_LENGTH
        write = starts + positions.repeat_interleave(heads)
        mask.view(-1)[write] = 0
        tokens = ids_PT[torch.arange(num), positions]
        found.append(decoder.decode(tokens, positions, cache, write=write, mask=mask))
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(folders: Any, family: str) -> None:
    folder = folders(family)
    decoder, saved = open_decoder(folder), load_file(folder / "model.safetensors")
    assert decoder.weights.keys() == saved.keys()
    for name, weight in saved.items():
        assert torch.equal(decoder.weights[name], weight), name
    ids_PT = torch.randint(0, VOCAB_SIZE, (2, CACHE_LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = decode_after(decoder, ids_PT)
        expected = load_causal_lm(str(folder), dtype=torch.float32, attn_implementation="eager")(ids_PT).logits
    for step, logits in enumerate(found):
        wanted = expected[torch.arange(2), LENGTHS - 1 + step]
        assert torch.allclose(logits.log_softmax(-1), wanted.log_softmax(-1), rtol=0, atol=1e-5), step
    assert found.std() > 0.3  # far from uniform


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sync_replaces_all_weights(folders: Any, family: str, tmp_path: Path) -> None:
    decoder, new = open_decoder(folders(family)), write_tiny(tmp_path, family=family, seed=1)
    expected = open_decoder(new)
    ids_PT = torch.randint(0, VOCAB_SIZE, (2, CACHE_LENGTH))
    with torch.inference_mode():
        before = decode_after(decoder, ids_PT)  # packs the old weights
        for name, weight in load_file(new / "model.safetensors").items():
            decoder.weights[name].copy_(weight)
        after = decode_after(decoder, ids_PT)
        assert not torch.allclose(before, after, atol=1e-2)
        assert torch.equal(after, decode_after(expected, ids_PT))


def test_the_bias_that_chooses_experts_is_in_float32(folders: Any) -> None:
    weights = open_decoder(folders("deepseek_v3"), torch.bfloat16).weights
    dtypes = {name.endswith("e_score_correction_bias"): weight.dtype for name, weight in weights.items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_released_weights_are_allocated_again(folders: Any, family: str) -> None:
    """Joined and stacked tensors share memory: each is released once, and all of them come back."""
    folder = folders(family)
    decoder = open_decoder(folder)
    ids_PT = torch.randint(0, VOCAB_SIZE, (2, CACHE_LENGTH))
    store = WeightStore(decoder.weights, decoder.aliases, receiver=None, checksum=None, version="0")
    with torch.inference_mode():
        before = decode_after(decoder, ids_PT)
        store.release()
        decoder.free_packed_weights()
        store.allocate()
        for name, weight in load_file(folder / "model.safetensors").items():
            decoder.weights[name].copy_(weight)
        assert torch.equal(decode_after(decoder, ids_PT), before)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "minimax_m2"])
def test_routes_are_the_experts_of_transformers(folders: Any, family: str) -> None:
    decoder = open_decoder(folders(family))
    model = load_causal_lm(str(folders(family)), dtype=torch.float32, attn_implementation="eager")
    chosen: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "router", None) or getattr(layer.mlp, "gate", None)
        if router is not None:
            router.register_forward_hook(lambda module, args, out, index=index: chosen.update({index: out[2]}))
    ids_PT = torch.randint(0, VOCAB_SIZE, (1, 12))
    with torch.inference_mode():
        decoder.encode(ids_PT, torch.tensor([12]))
        model(ids_PT)
    routes = decoder.expert_ids()
    assert routes.shape[:2] == (12, 2) and chosen
    for index in range(2):
        expected = chosen.get(index, torch.zeros_like(routes[:, index]))
        assert torch.equal(routes[:, index].long().sort(dim=1).values, expected.long().sort(dim=1).values)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_samples_of_one_prompt_share_its_prefill(folders: Any, open_scheduler: OpenScheduler, family: str) -> None:
    scheduler = open_scheduler(path=folders(family))
    params: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    together = generate(scheduler, [5, 6, 7], n=3, sampling_seed=100, **params)
    alone = [generate(scheduler, [5, 6, 7], sampling_seed=100 + j, **params)[0] for j in range(3)]
    assert [(a.output_ids, a.logprobs) for a in together] == [(a.output_ids, a.logprobs) for a in alone]


ADAPTED = {
    "deepseek_v3": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.o_proj"),
    "glm4": ("self_attn.k_proj", "mlp.gate_up_proj"),
    "gpt_oss": ("self_attn.q_proj", "self_attn.o_proj"),
}


@pytest.mark.parametrize("family", ADAPTED)
def test_an_adapter_generates_as_the_merged_weights(folders: Any, open_scheduler: OpenScheduler, family: str) -> None:
    adapted, merged = open_scheduler(path=folders(family)), open_scheduler(path=folders(family))
    layers = tuple(f"model.layers.1.{layer}" for layer in ADAPTED[family])
    tensors = tensors_of(adapted, 0, layers=layers)
    base = answer(adapted)
    load(adapted, update_of(tensors))
    merge(merged, tensors)
    got, expected = answer(adapted), answer(merged)
    assert got.output_ids == expected.output_ids
    assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert abs(got.logprobs[0] - base.logprobs[0]) > 1e-2


def test_a_config_that_leaves_positions_to_code_is_refused() -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 2, **FIGURES, **FAMILIES["gpt_oss"]}
    del config["rope_parameters"]
    with pytest.raises(ValueError, match="rope_parameters must be set for model_type=gpt_oss"):
        DecoderConfig.from_config_json(config)


def test_an_unknown_kind_of_attention_is_refused() -> None:
    kinds = {"layer_types": ["full_attention", "chunked_attention"]}
    with pytest.raises(ValueError, match="layer_types must be sliding_attention or full_attention, got chunked_att"):
        DecoderConfig.from_config_json({"model_type": "gpt_oss", **FIGURES, **FAMILIES["gpt_oss"], **kinds})


def test_published_fields_of_partial_rotary_positions() -> None:
    def rotary_dim(family: str, **more: float) -> int:
        return DecoderConfig.from_config_json({"model_type": family, **FIGURES, "rope_theta": 1e4, **more}).rotary_dim

    assert rotary_dim("glm4") == 8  # half of a head, by the code of the family
    assert rotary_dim("glm4", partial_rotary_factor=1.0) == 16
    assert rotary_dim("minimax_m2", rotary_dim=4) == 4
    assert rotary_dim("qwen3") == 16
