"""Files that stand in for missing ones."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family
from rlscale.config import DataConfig, RolloutConfig
from rlscale.data.prompts import load_prompts
from rlscale.models.byte_tokenizer import NUM_TOKENS, byte_tokenizer
from rlscale.models.hf_models import load_tokenizer
from rlscale.plan.mtp_layers import MtpLayers
from rlscale.rehearsal.cut_layout import LayoutSizes
from rlscale.rehearsal.generated_files import RowKeys, write_model, write_rows
from rlscale.rehearsal.tiny_family import tiny_config_json
from tests.unit.rehearsal.model_options import model_fields

SIZES = LayoutSizes(nodes=1, gpus=2, gpus_per_node=2, tensor=2)


def test_the_byte_tokenizer_encodes_every_text() -> None:
    tokenizer = byte_tokenizer(512)
    text = "Grüße, 東京\t\x00"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert len(tokenizer) == NUM_TOKENS and NUM_TOKENS % 2 == 1


# One of each kind of layers: with experts, with experts as wide as `intermediate_size`, with latent attention, with
# norms after attention and MLP.
@pytest.mark.parametrize(
    "option", ["qwen3_30b_a3b", "minimax_m25", "deepseek_r1", "kimi_k2", "glm4_9b", "glm45_106b_a12b"]
)
def test_transformers_builds_the_tiny_model(option: str, tmp_path: Path) -> None:
    config_json = tiny_config_json(model_fields(option), SIZES, vocab_size=NUM_TOKENS)
    write_model(tmp_path, config_json, seed=1)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == config_json["model_type"] and written["vocab_size"] == NUM_TOKENS
    assert (tmp_path / "model.safetensors").stat().st_size < 2_000_000
    assert len(load_tokenizer(str(tmp_path))) == NUM_TOKENS
    tensors = load_file(tmp_path / "model.safetensors")
    counted = sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias"))
    assert counted == Architecture.from_config_json(config_json).parameters


# A family whose checkpoints have copies of the embedding in these layers, and one with layers of other names.
@pytest.mark.parametrize(("option", "family_name"), [("glm45_106b_a12b", "glm4_moe"), ("qwen25_0_5b", "mimo")])
def test_layers_for_multi_token_prediction_are_in_the_files(option: str, family_name: str, tmp_path: Path) -> None:
    fields = {**model_fields(option), "model_type": family_name, "tie_word_embeddings": False}
    config_json = tiny_config_json(fields, SIZES, vocab_size=NUM_TOKENS, num_mtp=2)
    write_model(tmp_path, config_json, seed=1)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 2
    a, tensors = Architecture.from_config_json(config_json), load_file(tmp_path / "model.safetensors")
    family = find_family(config_json["model_type"])
    assert family.mtp is not None and family.hf_names is not None
    names = {
        name
        for k in range(2)
        for weight, _ in family.mtp.layer_weights(
            family.hf_names, k, num_layers=a.num_layers, num_experts=a.num_experts, without=a.missing_features
        )
        for name in weight.hf
    }
    own = {name: tensor for name, tensor in tensors.items() if family.mtp.has(name, num_layers=a.num_layers)}
    copies = {name for name in own if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert own.keys() - copies == names and len(copies) == 2 * len(family.mtp.copies)
    buffers = [name for name in own if name.endswith("e_score_correction_bias")]
    counted = sum(own[name].numel() for name in names - set(buffers))
    assert counted == MtpLayers(number=2).parameters(a)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_generated_rows_are_prompts_with_labels(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"train.{ending}"
    write_rows(file, RowKeys(input="question", label="answer"), number=5, conversation=False)
    keys = DataConfig(prompt_data=str(file), input_key="question", label_key="answer", apply_chat_template=True)
    prompts = load_prompts(keys, RolloutConfig(), byte_tokenizer(512))
    assert [prompt.label for prompt in prompts] == ["1", "3", "5", "7", "9"]
    assert prompts[0].text == "<|user|>What is 0 + 1?<|assistant|>"


def test_generated_rows_have_different_pictures(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    write_rows(file, RowKeys(input="problem", label="answer", images="images"), number=3, conversation=False)
    fields = {**model_fields("tiny_qwen3_vl"), "num_layers": 2}
    write_model(tmp_path / "model", tiny_config_json(fields, SIZES, vocab_size=NUM_TOKENS), seed=0)
    keys = DataConfig(
        prompt_data=str(file),
        input_key="problem",
        label_key="answer",
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
    )
    prompts = load_prompts(keys, RolloutConfig(), load_tokenizer(str(tmp_path / "model")))
    assert len({prompt.images[0].digest for prompt in prompts}) == 3
    assert all(prompt.token_ids.count(prompt.images[0].token) == 16 for prompt in prompts)
