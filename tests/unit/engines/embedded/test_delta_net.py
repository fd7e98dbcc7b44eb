"""Gated delta nets in the engine: states of padded prompts and of slots, pauses, and names of published models."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlscale.engines.embedded.decode_batch import DecodeBatch
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.load_decoder import load_decoder
from rlscale.engines.embedded.named_weights import NamedWeights
from rlscale.engines.embedded.requests import Request, Sequence
from rlscale.models.hf_models import load_causal_lm
from rlscale.weights.buckets import describe_bucket
from tests.tiny_model import VOCAB_SIZE, write_tiny
from tests.unit.engines.embedded.conftest import OpenScheduler, generate, make_request, no_transformers

LENGTH = 16
PROMPT = [5, 6, 7, 8, 9]

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda family: write_tiny(tmp_path_factory.mktemp(family), family=family))


def open_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder, _ = load_decoder(str(path), no_transformers, dtype=dtype, device=torch.device("cpu"), max_context_len=None)
    return decoder


def states_of(cache: PromptCache | KvCache) -> tuple[Tensor, Tensor]:
    assert cache.states is not None
    return cache.states.windows, cache.states.matrices


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_padding_changes_no_state(folder: Folder, family: str) -> None:
    decoder = open_decoder(folder(family))
    # The shortest prompt has fewer tokens than the convolution reads.
    lengths = torch.tensor([LENGTH, 2, 9])
    ids_PT = torch.randint(0, VOCAB_SIZE, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        together, _ = decoder.prefill(ids_PT, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone, _ = decoder.prefill(ids_PT[row : row + 1, :length], lengths[row : row + 1])
            for found, expected in zip(states_of(together.row(row)), states_of(alone), strict=True):
                assert expected.abs().max() > 0.02
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not states_of(together.row(1))[0][:, :, 0].any()


def test_only_attention_has_keys_and_values(folder: Folder) -> None:
    decoder = open_decoder(folder("qwen3_next"), torch.bfloat16)
    a, cache = decoder.architecture, decoder.new_cache(4, 64, 32)
    assert cache.values.shape == (1, 2, 4 * 2, 32, 16)
    windows, matrices = states_of(cache)
    assert (windows.dtype, matrices.dtype) == (torch.bfloat16, torch.float32)
    assert windows.nbytes + matrices.nbytes == 4 * a.state_bytes(dtype_bytes=2)
    assert 64 * a.expanded_cache_bytes_per_token(dtype_bytes=2) == 2 * 2 * 64 * 16 * 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_free_slot_has_no_state(folder: Folder, deterministic: bool) -> None:
    """The sequence of the first slot ends: in a compact batch the last one moves there."""
    decoder = open_decoder(folder("qwen3_5_text"))
    batch = DecodeBatch(decoder, 32, num_slots=3, deterministic=deterministic)
    spec = make_request(PROMPT, max_new_tokens=8)
    request = Request(
        spec=spec, stop_ids=frozenset(), blocked_ids=(), decode=lambda ids: "", adapter=None, future=Future()
    )
    sequences = [Sequence(request=request, index=i, seed=i, ids=[11 + i]) for i in range(3)]
    with torch.inference_mode():
        prompt, _ = decoder.prefill(torch.tensor([PROMPT]), torch.tensor([len(PROMPT)]))
        batch.place(sequences, prompt, len(PROMPT))
        for before, placed in zip(states_of(prompt), states_of(batch._cache), strict=True):
            assert torch.equal(placed, before.expand_as(placed))
        batch.step()
        stepped = [each.clone() for each in states_of(batch._cache)]
        batch.remove(sequences[0])
        left = [stepped[0][:, 2], stepped[0][:, 1]] if not deterministic else [None, stepped[0][:, 1]]
        found = states_of(batch._cache)[0]
        assert all(torch.equal(found[:, slot], state) for slot, state in enumerate(left) if state is not None)
        free = 0 if deterministic else 2
        assert not any(each[:, free].any() for each in states_of(batch._cache))
        assert all(each[:, 1].any() for each in states_of(batch._cache))


@pytest.mark.slow
def test_rows_of_any_number_of_slots_do_not_depend_on_each_other(folder: Folder, open_scheduler: OpenScheduler) -> None:
    """Of 5 slots the last would fall into the remainder that torch computes without vectors."""
    scheduler = open_scheduler(path=folder("qwen3_5_moe_text"), num_slots=5)
    params: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    alone = [generate(scheduler, PROMPT, sampling_seed=j, **params)[0] for j in range(10)]
    together = generate(scheduler, PROMPT, n=10, sampling_seed=0, **params)
    assert [(a.output_ids, a.logprobs) for a in together] == [(a.output_ids, a.logprobs) for a in alone]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_an_aborted_answer_continues_from_a_prompt_pass(
    folder: Folder, open_scheduler: OpenScheduler, family: str
) -> None:
    scheduler = open_scheduler(path=folder(family))
    params: dict[str, Any] = {"sampling_seed": 3, "ignore_eos": True}
    whole = generate(scheduler, PROMPT, max_new_tokens=16, **params)[0]
    rest = generate(scheduler, [*PROMPT, *whole.output_ids[:6]], max_new_tokens=10, **params)[0]
    assert rest.output_ids == whole.output_ids[6:]
    assert rest.logprobs == pytest.approx(whole.logprobs[6:], abs=1e-5)


def published(path: Path, tmp_path: Path) -> Path:
    """The same model as it would be published: with a vision tower and a layer for multi-token prediction."""
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 64}
    family = text["model_type"].removesuffix("_text")
    config = {"model_type": family, "text_config": text, "vision_config": vision, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": text["tie_word_embeddings"]}))
    return tmp_path


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_published_models_and_both_names(folder: Folder, tmp_path: Path, family: str) -> None:
    path = published(folder(family), tmp_path)
    decoder, ids_PT = open_decoder(path), torch.randint(0, VOCAB_SIZE, (1, LENGTH))
    with torch.inference_mode():
        _, found = decoder.prefill(ids_PT, torch.tensor([LENGTH]))
        expected = load_causal_lm(str(path), dtype=torch.float32)(ids_PT).logits[0, -1]
    torch.testing.assert_close(found[0].log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
    weights = NamedWeights(decoder.weights, decoder.aliases, is_unused=decoder.is_unused)
    for file in (folder(family), path):
        sent = load_file(file / "model.safetensors")
        own = [target for name, target in zip(sent, weights.targets(describe_bucket(list(sent.items()))), strict=True)]
        assert not weights.missing(weights.own_names(sent))
        live = {id(tensor) for tensor in decoder.weights.values()}
        used = [name for name, target in zip(sent, own, strict=True) if id(target) in live]
        assert [name for name in sent if name not in used] == [name for name in sent if decoder.is_unused(name)]
