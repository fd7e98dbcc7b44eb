import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlscale.config import ModelBuild, ModelConfig
from rlscale.errors import ConfigError
from rlscale.models.char_tokenizer import CHARACTERS
from rlscale.models.hf_models import load_causal_lm, load_tokenizer
from rlscale.models.resolve_model import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return resolve_model(
        ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(tmp_path), num_layers=1, hidden_size=16, head_dim=8)
    )


def test_the_tokenizer_round_trips_every_character(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(CHARACTERS, add_special_tokens=False)
    assert len(ids) == len(CHARACTERS) == 96
    assert tokenizer.decode(ids) == CHARACTERS
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([*ids[:3], 1, 0, 0], skip_special_tokens=True) == CHARACTERS[:3]


def test_a_chat_costs_three_tokens(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>1+1=<|assistant|>2<|eos|>"
    assert len(tokenizer.encode(text, add_special_tokens=False)) == len("1+1=2") + 3
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>1+1=<|assistant|>"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model(folder: str, dtype: torch.dtype) -> None:
    model = load_causal_lm(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    logits = model(torch.tensor([[3, 24, 4]])).logits
    assert logits.shape == (1, 3, len(load_tokenizer(folder)))


def test_a_missing_weight_is_an_error_that_names_it(folder: str) -> None:
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing, the first is model\.norm\.weight"):
        load_causal_lm(folder, dtype=torch.float32)


def test_load_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint must have a tokenizer, got"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint must be a checkpoint that transformers can load"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="the package flash-attn is installed")
def test_attention_of_a_missing_package_is_an_error(folder: str) -> None:
    expected = (
        "fsdp.attn_implementation must be an attention implementation whose package is installed, "
        "got flash_attention_2; "
    )
    with pytest.raises(ConfigError, match=f"{re.escape(expected)}.*or use sdpa"):
        load_causal_lm(folder, dtype=torch.float32, attn_implementation="flash_attention_2")
