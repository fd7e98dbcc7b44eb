import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlscale.architectures.hf_config import hf_fields, tiny_model_fields
from rlscale.config import ModelBuild, ModelConfig
from rlscale.errors import ConfigError
from rlscale.models.hf_models import load_causal_lm
from rlscale.models.resolve_model import cache_root, resolve_model

SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 8,
}


def tiny(cache: Path, **figures: Any) -> ModelConfig:
    return ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(cache), **(SMALL | figures))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(resolve_model(tiny(tmp_path_factory.mktemp("cache"))))


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "model"))


def test_a_model_is_built_once_and_found_again(tmp_path: Path) -> None:
    folder = Path(resolve_model(tiny(tmp_path)))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(tiny(tmp_path)) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_weights_depend_on_fields_and_seed_alone(tmp_path: Path) -> None:
    weights = [
        Path(resolve_model(tiny(tmp_path / name, init_seed=seed)), "model.safetensors").read_bytes()
        for name, seed in [("a", 0), ("b", 0), ("a", 1)]
    ]
    assert weights[0] == weights[1] != weights[2]


def test_concurrent_builds_create_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(resolve_model, [tiny(tmp_path)] * 4))
    (folder,) = map(Path, folders)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1


def test_fields_reach_the_checkpoint(tmp_path: Path) -> None:
    given = {"vocab_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": False, "rotary_base": 500}
    folder = Path(resolve_model(tiny(tmp_path, **given, num_key_value_heads=1)))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["vocab_size"], config["max_position_embeddings"], config["num_key_value_heads"]) == (128, 64, 1)
    assert config["tie_word_embeddings"] is False and config["rope_parameters"]["rope_theta"] == 500
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]


def tiny_moe(cache: Path, **figures: Any) -> ModelConfig:
    small = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return ModelConfig(build=ModelBuild.tiny_qwen3_moe, cache_dir=str(cache), **(small | experts | figures))


def test_a_model_with_experts_is_built(tmp_path: Path) -> None:
    folder = Path(resolve_model(tiny_moe(tmp_path)))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts_per_tok"], config["moe_intermediate_size"]) == (2, 8)
    weights = load_file(folder / "model.safetensors")
    assert weights["model.layers.0.mlp.gate.weight"].shape == (3, 16)
    assert weights["model.layers.0.mlp.experts.2.down_proj.weight"].shape == (16, 8)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" not in weights
    assert folder.name.startswith("tiny_qwen3_moe-")


def test_top_k_is_at_most_the_number_of_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_experts_per_tok must be at most model\.num_experts \(3\), got 4"):
        resolve_model(tiny_moe(tmp_path, num_experts_per_tok=4))


@pytest.mark.parametrize("build", ModelBuild)
def test_fields_of_a_build_equal_those_of_its_config(build: ModelBuild, tmp_path: Path) -> None:
    """A plan computes with these fields before the model is built."""
    folder = Path(resolve_model(ModelConfig(build=build, cache_dir=str(tmp_path))))
    figures, found = tiny_model_fields(build), hf_fields(json.loads((folder / "config.json").read_text()))
    assert {name: found[name] for name in figures} == figures


@pytest.mark.slow
def test_every_field_of_experts_and_latent_attention_is_compared(copy: Path) -> None:
    """Under the names that DeepSeek's config.json has."""
    published = {
        "model_type": "deepseek_v3",
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10_000,
    }
    config = json.loads((copy / "config.json").read_text())
    del config["rope_parameters"]
    (copy / "config.json").write_text(json.dumps(config | published))
    figures = hf_fields(published)
    assert resolve_model(ModelConfig(hf_checkpoint=str(copy), **figures)) == str(copy)
    others = {name: value + 1 for name, value in figures.items() if name != "model_type"}
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(hf_checkpoint=str(copy), model_type="kimi_k2", **others))
    assert {problem.path for problem in caught.value.problems} == {f"model.{name}" for name in figures}
    assert len(figures) == len(published)


def test_all_contradicting_fields_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(tiny(tmp_path, vocab_size=50, num_attention_heads=3, num_key_value_heads=2, head_dim=7))
    assert [problem.path for problem in caught.value.problems] == [
        "model.vocab_size",
        "model.num_attention_heads",
        "model.head_dim",
    ]


def test_a_folder_is_used_as_it_is(built: Path) -> None:
    assert resolve_model(ModelConfig(hf_checkpoint=str(built), num_layers=1, rotary_base=10_000)) == str(built)


def test_a_hub_id_is_returned() -> None:
    assert resolve_model(ModelConfig(hf_checkpoint="Qwen/Qwen3-4B")) == "Qwen/Qwen3-4B"


def test_a_hub_id_is_compared_with_the_local_cache(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    shutil.copy(built / "config.json", snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert resolve_model(ModelConfig(hf_checkpoint="me/mine", num_layers=1)) == "me/mine"
    with pytest.raises(ConfigError, match=r"model\.num_layers must be 1, as in config\.json of 'me/mine', got 2"):
        resolve_model(ModelConfig(hf_checkpoint="me/mine", num_layers=2))


def test_fields_are_compared_with_a_checkpoint(built: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(hf_checkpoint=str(built), num_layers=2, hidden_size=16, rotary_base=7))
    assert [(problem.path, problem.value) for problem in caught.value.problems] == [
        ("model.num_layers", "2"),
        ("model.rotary_base", "7"),
    ]


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"must be a folder with weights, got .*; it has neither model\.safetensors"):
        resolve_model(ModelConfig(hf_checkpoint=str(copy)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "its config.json is not JSON"),
        ("[]", "its config.json is not an object"),
        ("{}", "must be a causal language model that transformers supports, got no architecture"),
        ('{"architectures": ["BertModel"]}', "got BertModel in"),
        ('{"architectures": ["WonderForCausalLM"]}', "got WonderForCausalLM in"),
    ],
)
@pytest.mark.slow
def test_a_folder_with_an_unusable_config(text: str, message: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_model(ModelConfig(hf_checkpoint=str(copy)))


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in [
        (tmp_path, "it has no config.json"),
        (tmp_path / "file", "model.hf_checkpoint must be a folder, got the file"),
        (tmp_path / "nothing", "model.hf_checkpoint must name an existing folder or a hub id"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            resolve_model(ModelConfig(hf_checkpoint=str(path)))
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint must be set, got None"):
        resolve_model(ModelConfig())


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLSCALE_CACHE", raising=False)
    assert cache_root(None) == Path.home() / ".cache" / "rlscale"
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path))
    assert cache_root(None) == tmp_path
    assert cache_root(str(tmp_path / "own")) == tmp_path / "own"


def test_a_model_with_latent_attention_is_built(tmp_path: Path) -> None:
    given = {"num_layers": 2, "first_k_dense_replace": 1, "num_experts": 4, "v_head_dim": 6}
    build = ModelConfig(build=ModelBuild.tiny_deepseek_v3, cache_dir=str(tmp_path), **given)
    folder = Path(resolve_model(build))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["head_dim"] == config["qk_rope_head_dim"]
    weights = load_file(folder / "model.safetensors")
    assert weights["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (4,)
    assert weights["model.layers.0.self_attn.o_proj.weight"].shape == (128, 4 * 6)
    assert "model.layers.0.mlp.gate_proj.weight" in weights and "model.layers.0.mlp.gate.weight" not in weights
    with pytest.raises(ConfigError, match=r"model\.qk_rope_head_dim must be even, for the rotary embedding, got 5"):
        resolve_model(ModelConfig(build=ModelBuild.tiny_deepseek_v3, cache_dir=str(tmp_path), qk_rope_head_dim=5))


def test_kimi_is_loaded_with_the_layers_of_deepseek(tmp_path: Path) -> None:
    build = ModelConfig(build=ModelBuild.tiny_deepseek_v3, cache_dir=str(tmp_path), num_layers=2)
    folder = Path(resolve_model(build))
    theirs = load_causal_lm(str(folder), dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    ours = load_causal_lm(str(folder), dtype=torch.float32)
    ids = torch.arange(7)[None]
    assert ours.config.model_type == "kimi_k2" and torch.equal(ours(ids).logits, theirs(ids).logits)
    ours.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
