import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import ModelBuild, ModelConfig
from rlscale.errors import ConfigError
from rlscale.models import cache_root, resolve_model

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


def test_is_made_once_and_found_again(tmp_path: Path) -> None:
    folder = Path(resolve_model(tiny(tmp_path)))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(tiny(tmp_path)) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_weights_depend_on_figures_and_seed_alone(tmp_path: Path) -> None:
    weights = [
        Path(resolve_model(tiny(tmp_path / name, init_seed=seed)), "model.safetensors").read_bytes()
        for name, seed in [("a", 0), ("b", 0), ("a", 1)]
    ]
    assert weights[0] == weights[1] != weights[2]


def test_several_at_the_same_time_make_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(resolve_model, [tiny(tmp_path)] * 4))
    (folder,) = map(Path, folders)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1


def test_figures_reach_the_checkpoint(tmp_path: Path) -> None:
    given = {"vocab_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": False, "rotary_base": 500}
    folder = Path(resolve_model(tiny(tmp_path, **given, num_key_value_heads=1)))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["vocab_size"], config["max_position_embeddings"], config["num_key_value_heads"]) == (128, 64, 1)
    assert config["tie_word_embeddings"] is False and config["rope_parameters"]["rope_theta"] == 500
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]


def test_figures_that_do_not_go_together_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(tiny(tmp_path, vocab_size=50, num_attention_heads=3, num_key_value_heads=2, head_dim=7))
    assert [problem.path for problem in caught.value.problems] == [
        "model.vocab_size",
        "model.num_attention_heads",
        "model.head_dim",
    ]


def test_a_folder_is_taken_as_it_is(built: Path) -> None:
    assert resolve_model(ModelConfig(hf_checkpoint=str(built), num_layers=1, rotary_base=10_000)) == str(built)


def test_a_hub_id_is_passed_on() -> None:
    assert resolve_model(ModelConfig(hf_checkpoint="Qwen/Qwen3-4B")) == "Qwen/Qwen3-4B"


def test_figures_are_compared_with_a_checkpoint(built: Path) -> None:
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
        ("{}", "must be a causal language model that transformers knows, got no architecture"),
        ('{"architectures": ["BertModel"]}', "got BertModel in"),
        ('{"architectures": ["WonderForCausalLM"]}', "got WonderForCausalLM in"),
    ],
)
def test_a_folder_with_another_config(text: str, message: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_model(ModelConfig(hf_checkpoint=str(copy)))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
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


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLSCALE_CACHE", raising=False)
    assert cache_root(None) == Path.home() / ".cache" / "rlscale"
    monkeypatch.setenv("RLSCALE_CACHE", str(tmp_path))
    assert cache_root(None) == tmp_path
    assert cache_root(str(tmp_path / "own")) == tmp_path / "own"
